"""per_client.csv: correct predictions, losses and traffic of every client.

It has one row per evaluation of a client's model on a split. `loss` is summed over the examples, in nats. `up_bytes`,
`down_bytes` and `fault` describe the client's round, so they are equal in all rows with the same round and client: use
one of these rows to sum bytes. The last columns are the metrics besides accuracy, if the run has some; a cell is empty
without examples. A client with traffic or a fault but without an evaluation has one row with empty split,
model and phase, and zero counts. Rows of a round are sorted by client, split, model and phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from pflsim.errors import SettingsError
from pflsim.records.files import write_atomically
from pflsim.records.history import METRICS, RoundMetrics, Traffic, client_traffic, fault_counts, from_line
from pflsim.types import EvalRow, NewcomerRecord, RoundRecord

PER_CLIENT = "per_client.csv"
COLUMNS = ("round", "client", "split", "model", "phase", "correct", "total", "loss", "up_bytes", "down_bytes", "fault")


def round_rows(record: RoundRecord, metrics: Sequence[str] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a round, with these metrics in the last columns."""
    traffic = client_traffic(record)
    unevaluated = (traffic.keys() | record.faults.keys()) - {row.client for row in record.evaluations}
    lines = [(row.client, _scope(row), _counts(row), _values(row, metrics)) for row in record.evaluations]
    lines += [(client, ("", "", ""), (0, 0, 0.0), [""] * len(metrics)) for client in unevaluated]
    for client, scope, counts, values in sorted(lines, key=lambda line: line[:2]):
        both_ways = astuple(traffic.get(client, Traffic()))
        yield record.round, client, *scope, *counts, *both_ways, record.faults.get(client, ""), *values


def newcomer_rows(record: NewcomerRecord, metrics: Sequence[str] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the evaluations of newcomers, with model "newcomer". Newcomers have no uplinks."""
    for row in sorted((*record.received, *record.trained), key=lambda row: (row.client, row.split, row.phase)):
        counts = row.client, row.split, "newcomer", row.phase, *_counts(row)
        yield record.round, *counts, 0, record.down_bytes[row.client], "", *_values(row, metrics)


def _scope(row: EvalRow) -> tuple[str, str, str]:
    return row.split, row.model, row.phase


def _counts(row: EvalRow) -> tuple[int, int, float]:
    return row.correct, row.total, row.loss


def _values(row: EvalRow, metrics: Sequence[str]) -> list[Any]:
    return [row.metrics.get(name, "") for name in metrics]


@dataclass(frozen=True, slots=True)
class Records:
    """The rounds that are complete and equal in metrics.jsonl and per_client.csv, without gaps from round 0 or 1.

    Args:
        history: their metrics.
        rows: the number of lines in per_client.csv by round.
        lines: all rounds in metrics.jsonl.
        reason: why the next round is not included; empty if there is none.
    """

    history: tuple[RoundMetrics, ...]
    rows: dict[int, int]
    lines: tuple[RoundMetrics, ...]
    reason: str

    @property
    def last(self) -> int:
        """Return the last round; 0 if there are none."""
        return self.history[-1].round if self.history else 0


def read_records(folder: Path) -> Records:
    """Read both files of a run folder up to the first round that is incomplete or differs between them.

    Raises:
        SettingsError: a file is missing, or per_client.csv has other columns.
    """
    header, *texts = _lines(folder / PER_CLIENT) or [""]
    if tuple(header.split(",")[: len(COLUMNS)]) != COLUMNS:
        raise SettingsError(f"{folder / PER_CLIENT} does not begin with the line {','.join(COLUMNS)}")
    rows: dict[int, list[list[str]]] = {}
    for cells in (text.split(",") for text in texts):
        if not cells[0].isdecimal() or cells[3:4] == ["newcomer"]:
            break
        rows.setdefault(int(cells[0]), []).append(cells)
    history, lines, reason = list[RoundMetrics](), list[RoundMetrics](), ""
    for number, text in enumerate(_lines(folder / METRICS), start=1):
        try:
            lines.append(metrics := from_line(text))
        except (ValueError, KeyError, TypeError, AttributeError):
            reason = reason or f"line {number} of {METRICS} cannot be read"
            continue
        earlier = history[-1].traffic_total if history else Traffic()
        if metrics.round not in ((history[-1].round + 1,) if history else (0, 1)):
            reason = reason or f"line {number} of {METRICS} is of round {metrics.round}"
        elif not _agree(rows.get(metrics.round, []), metrics, earlier):
            reason = reason or f"{PER_CLIENT} does not match round {metrics.round}"
        if not reason:
            history.append(metrics)
    return Records(tuple(history), {number: len(own) for number, own in rows.items()}, tuple(lines), reason)


def _agree(rows: Sequence[Sequence[str]], metrics: RoundMetrics, earlier: Traffic) -> bool:
    """Return whether the rows of a round match its metrics in traffic, evaluations and faults."""
    try:
        clients = {row[1]: (Traffic(int(row[8]), int(row[9])), row[10]) for row in rows}
        evaluated = Counter((row[3], row[2], row[4]) for row in rows if int(row[6]) > 0)
    except (ValueError, IndexError):
        return False
    traffic = sum((each for each, _ in clients.values()), Traffic())
    found = traffic, earlier + traffic, fault_counts(fault for _, fault in clients.values()), evaluated
    expected = {tuple(scope): stats.clients for scope, stats in metrics.accuracy.items()}
    return found == (metrics.traffic, metrics.traffic_total, dict(metrics.faults), expected)


def cut(folder: Path, records: Records, after: int) -> None:
    """Remove the lines of later rounds from both files, each atomically."""
    rows = 1 + sum(rows for number, rows in records.rows.items() if number <= after)
    rounds = sum(metrics.round <= after for metrics in records.history)
    for name, count in ((METRICS, rounds), (PER_CLIENT, rows)):
        data = (folder / name).read_bytes()
        kept = b"".join(line + b"\n" for line in data.split(b"\n")[:count])
        if kept != data:
            write_atomically(folder / name, kept)


def _lines(path: Path) -> list[str]:
    """Return the complete lines of a file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except OSError as error:
        raise SettingsError(f"the run cannot resume: {path} cannot be read: {error.strerror}") from error
