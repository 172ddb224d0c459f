"""per_client.csv: correct predictions, losses and traffic of every client.

It has one row per evaluation of a client's model on a split. `loss` is summed over the examples, in nats. `up_bytes`,
`down_bytes` and `fault` describe the client's round, so they are equal in all rows with the same round and client: use
one of these rows to sum bytes. The next columns are the metrics besides accuracy, if the run has some; a cell is empty
without examples, or if the metric is undefined for them. `correct` is empty unless classes are predicted. The last
column is `name`, the client's, if the clients have names. A client with traffic or a fault but without an evaluation
has one row with empty split, model and phase, and zero counts. Rows of a round are sorted by client, split, model and
phase.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, cast

from pflsim.records.files import write_atomically
from pflsim.records.history import METRICS, RoundMetrics, Traffic, client_traffic, from_line
from pflsim.records.summary import RunMeta
from pflsim.types import EvalRow, NewcomerRecord, RoundRecord

PER_CLIENT = "per_client.csv"
COLUMNS = ("round", "client", "split", "model", "phase", "correct", "total", "loss", "up_bytes", "down_bytes", "fault")


def round_rows(record: RoundRecord, meta: RunMeta) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a round, with the metrics of the run and the clients' names in the last columns."""
    traffic, empty = client_traffic(record), cast(Any, "")
    unevaluated = (traffic.keys() | record.faults.keys()) - {row.client for row in record.evaluations}
    rows = [*record.evaluations, *(EvalRow(client, empty, empty, empty, 0, 0, 0.0) for client in unevaluated)]
    for row in sorted(rows, key=lambda row: (row.client, row.split, row.model, row.phase)):
        sent, fault = traffic.get(row.client, Traffic()), record.faults.get(row.client, "")
        yield record.round, *_cells(row, row.model, sent, fault, meta)


def newcomer_rows(record: NewcomerRecord, meta: RunMeta) -> Iterator[tuple[Any, ...]]:
    """Yield the evaluations of newcomers, with model "newcomer". Newcomers have no uplinks."""
    for row in sorted(
        (*record.received, *record.trained, *record.few), key=lambda row: (row.client, row.split, row.phase)
    ):
        yield record.round, *_cells(row, "newcomer", Traffic(0, record.down_bytes[row.client]), "", meta)


def _cells(row: EvalRow, model: str, sent: Traffic, fault: str, meta: RunMeta) -> tuple[Any, ...]:
    counts, others = (row.correct, row.total, row.loss), [row.metrics.get(name, "") for name in meta.measures.columns]
    name = [meta.client_names[row.client]] if meta.client_names else []
    return row.client, row.split, model, row.phase, *counts, *astuple(sent), fault, *others, *name


def complete_rounds(folder: Path) -> list[RoundMetrics]:
    """Return the first rounds in metrics.jsonl, up to one that is damaged, or not complete in per_client.csv."""
    history, rows = list[RoundMetrics](), _rows(folder)
    with suppress(ValueError, LookupError, TypeError):  # a damaged line
        for line in _lines(folder / METRICS):
            metrics = from_line(line)
            follows = metrics.round == history[-1].round + 1 if history else metrics.round in (0, 1)
            if not follows or not _agree(rows.get(metrics.round, []), metrics):
                break
            history.append(metrics)
    return history


def _agree(lines: Sequence[str], metrics: RoundMetrics) -> bool:
    """Return whether the rows of a round are in order and match its metrics in traffic and evaluations."""
    rows = [line.split(",") for line in lines]
    places = [(int(row[1]), *row[2:5]) for row in rows]
    if places != sorted({*places}):
        return False
    traffic = {row[1]: Traffic(int(row[8]), int(row[9])) for row in rows}
    evaluated = Counter((row[3], row[2], row[4]) for row in rows if int(row[6]) > 0)
    expected = {tuple(scope): stats.clients for scope, stats in metrics.evaluations.items()}
    return (sum(traffic.values(), Traffic()), evaluated) == (metrics.traffic, expected)


def cut(folder: Path, after: int) -> None:
    """Remove the lines of later rounds and of newcomers from both files, each atomically."""
    rows = [row for number, own in _rows(folder).items() if number <= after for row in own]
    metrics = [line for line in complete_rounds(folder) if line.round <= after]
    for name, count in ((METRICS, len(metrics)), (PER_CLIENT, 1 + len(rows))):
        write_atomically(folder / name, "".join(f"{line}\n" for line in _lines(folder / name)[:count]))


def _rows(folder: Path) -> dict[int, list[str]]:
    """Return the rows of per_client.csv by round, up to one that is damaged, out of order or of a newcomer."""
    rows: dict[int, list[str]] = {}
    for line in _lines(folder / PER_CLIENT)[1:]:
        cells = line.split(",")
        if not cells[0].isdecimal() or cells[3:4] == ["newcomer"] or int(cells[0]) < next(reversed(rows), 0):
            break
        rows.setdefault(int(cells[0]), []).append(line)
    return rows


def _lines(path: Path) -> list[str]:
    """Return the complete lines of a file."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
