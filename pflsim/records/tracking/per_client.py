"""per_client.csv: correct predictions, losses and traffic of every client.

It has one row per evaluation of a client's model on a split. `loss` is summed over the examples, in nats. `up_bytes`,
`down_bytes` and `fault` describe the client's round, so they are equal in all rows with the same round and client: use
one of these rows to sum bytes. The last columns are the metrics besides accuracy, if the run has some; a cell is empty
without examples. A client with traffic or a fault but without an evaluation has one row with empty split,
model and phase, and zero counts. Rows of a round are sorted by client, split, model and phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

from pflsim.records.accounting import Traffic, client_traffic
from pflsim.types import EvalRow, NewcomerRecord, RoundRecord

COLUMNS = ("round", "client", "split", "model", "phase", "correct", "total", "loss", "up_bytes", "down_bytes", "fault")


def round_rows(record: RoundRecord, metrics: Sequence[str] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a round, with these metrics in the last columns."""
    traffic = client_traffic(record)
    rows = sorted(record.evaluations, key=lambda row: (row.client, row.split, row.model, row.phase))
    unevaluated = (traffic.keys() | record.faults.keys()) - {row.client for row in rows}
    lines = [(row.client, (row.split, row.model, row.phase, *_counts(row)), _values(row, metrics)) for row in rows]
    lines += [(client, ("", "", "", 0, 0, 0.0), [""] * len(metrics)) for client in unevaluated]
    for client, counts, values in sorted(lines, key=lambda line: line[0]):
        both_ways = astuple(traffic.get(client, Traffic()))
        yield record.round, client, *counts, *both_ways, record.faults.get(client, ""), *values


def newcomer_rows(record: NewcomerRecord, metrics: Sequence[str] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the evaluations of newcomers, with model "newcomer". Newcomers have no uplinks."""
    for row in sorted((*record.received, *record.trained), key=lambda row: (row.client, row.split, row.phase)):
        counts = row.client, row.split, "newcomer", row.phase, *_counts(row)
        yield record.round, *counts, 0, record.down_bytes[row.client], "", *_values(row, metrics)


def _counts(row: EvalRow) -> tuple[int, int, float]:
    return row.correct, row.total, row.loss


def _values(row: EvalRow, metrics: Sequence[str]) -> list[Any]:
    return [row.metrics.get(name, "") for name in metrics]
