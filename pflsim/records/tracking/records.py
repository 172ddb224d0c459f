"""Reads metrics.jsonl and per_client.csv, checks that they agree, and truncates them for a resumed session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pflsim.errors import SettingsError
from pflsim.records.accounting import Traffic
from pflsim.records.files import write_atomically
from pflsim.records.history import RoundMetrics, fault_counts, from_line
from pflsim.records.tracking.per_client import COLUMNS

METRICS, PER_CLIENT = "metrics.jsonl", "per_client.csv"


@dataclass(slots=True)
class _Rows:
    """The rows of one round in per_client.csv. `end` is the byte offset of their end."""

    end: int
    clients: dict[int, tuple[Traffic, str]] = field(default_factory=dict)
    evaluated: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """The number of clients with examples, by scope."""

    def add(self, cells: list[str], end: int) -> None:
        _, client, split, model, phase, correct, examples, loss, up, down, fault, *metrics = cells
        _ = [float(cell) for cell in metrics if cell]
        entry, total_examples, _ = (Traffic(int(up), int(down)), fault), int(examples), (int(correct), float(loss))
        if self.clients.setdefault(int(client), entry) != entry:
            raise ValueError("the rows of a client differ in traffic or fault")
        if total_examples > 0:
            self.evaluated[model, split, phase] += 1
        self.end = end

    def agree(self, metrics: RoundMetrics, earlier: Traffic) -> bool:
        """Return whether traffic, evaluations and faults match a line of metrics.jsonl after `earlier` traffic."""
        evaluated = {tuple(scope): stats.clients for scope, stats in metrics.accuracy.items()}
        traffic = sum((traffic for traffic, _ in self.clients.values()), Traffic())
        faults = fault_counts({client: fault for client, (_, fault) in self.clients.items()})
        own = traffic, earlier + traffic, self.evaluated, faults
        return own == (metrics.traffic, metrics.traffic_total, evaluated, dict(metrics.faults))


@dataclass(frozen=True, slots=True)
class Records:
    """The rounds that are complete and equal in both files, without gaps from round 0 or 1.

    Args:
        history: their metrics.
        ends: the byte offsets in metrics.jsonl and in per_client.csv at which the header and each round end.
        lines: all rounds in metrics.jsonl.
        reason: why the next round is not included; empty if there is none.
    """

    history: tuple[RoundMetrics, ...]
    ends: tuple[tuple[int, int], ...]
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
    data = _contents(folder, PER_CLIENT)
    header = data[: data.find(b"\n") + 1]
    if tuple(header.decode(errors="replace").strip().split(",")[: len(COLUMNS)]) != COLUMNS:
        raise SettingsError(f"{folder / PER_CLIENT} does not begin with the line {','.join(COLUMNS)}")
    rows, bad_row = _rows(data, header)
    history, lines = list[RoundMetrics](), list[RoundMetrics]()
    ends, reason = [(0, len(header))], ""
    for number, (metrics, end) in enumerate(_lines(_contents(folder, METRICS)), start=1):
        found = rows.get(metrics.round if metrics else -1) or _Rows(ends[-1][1])
        lines += [metrics] if metrics else []
        if reason:
            continue
        if metrics is None:
            reason = f"line {number} of {METRICS} cannot be read"
        elif metrics.round not in ((history[-1].round + 1,) if history else (0, 1)):
            reason = f"line {number} of {METRICS} is of round {metrics.round}"
        elif not found.agree(metrics, history[-1].traffic_total if history else Traffic()):
            reason = f"{PER_CLIENT} does not match round {metrics.round}{bad_row}"
        else:
            history.append(metrics)
            ends.append((end, found.end))
    return Records(tuple(history), tuple(ends), tuple(lines), reason)


def cut(folder: Path, ends: tuple[int, int]) -> None:
    """Truncate both files to these sizes in bytes, each atomically."""
    for name, end in zip((METRICS, PER_CLIENT), ends, strict=True):
        data = _contents(folder, name)
        if len(data) > end:
            write_atomically(folder / name, data[:end])


def _contents(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise SettingsError(f"the run cannot resume: {folder / name} cannot be read: {error.strerror}") from error


def _lines(data: bytes) -> Iterator[tuple[RoundMetrics | None, int]]:
    """Yield each complete line's metrics (None if invalid) and the byte offset of its end."""
    end = 0
    for line in data.split(b"\n")[:-1]:  # what follows the last newline is incomplete
        end += len(line) + 1
        try:
            yield from_line(line.decode()), end
        except (ValueError, KeyError, TypeError, AttributeError):
            yield None, end


def _rows(data: bytes, header: bytes) -> tuple[dict[int, _Rows], str]:
    """Return the rows by round, and a text that names the first invalid row. Stops there, or at rows of newcomers."""
    rounds: dict[int, _Rows] = {}
    end, latest = len(header), 0
    for number, line in enumerate(data[len(header) :].split(b"\n")[:-1], start=2):
        try:
            cells = line.decode().split(",")
            if len(cells) != header.count(b",") + 1:
                raise ValueError("a row must have a cell for each column")
            round_number = int(cells[0])
            if round_number < latest:
                raise ValueError("rounds must not decrease")
            if cells[3] == "newcomer":
                break
            end += len(line) + 1
            rounds.setdefault(round_number, _Rows(end)).add(cells, end)
            latest = round_number
        except (ValueError, IndexError):
            return rounds, f": line {number} cannot be read"
    return rounds, ""
