"""Reads metrics.jsonl and per_client.csv, checks that they agree, and truncates them for a resumed session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pflsim.errors import SettingsError
from pflsim.run_folder.accounting import Ledger, Traffic, total
from pflsim.run_folder.files import write_atomically
from pflsim.run_folder.history import RoundMetrics, fault_counts, from_line
from pflsim.run_folder.tracking.per_client import COLUMNS

METRICS, PER_CLIENT = "metrics.jsonl", "per_client.csv"


@dataclass(slots=True)
class _Rows:
    """The rows of one round in per_client.csv. `end` is the byte offset of their end."""

    end: int
    clients: dict[int, tuple[Traffic, str]] = field(default_factory=dict)
    evaluated: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """The number of clients with examples, by scope."""

    @property
    def traffic(self) -> dict[int, Traffic]:
        return {client: traffic for client, (traffic, _) in self.clients.items() if traffic != Traffic()}

    def add(self, cells: list[str], end: int) -> None:
        _, client, split, model, phase, correct, examples, loss, up, down, fault = cells
        entry, total_examples, _ = (Traffic(int(up), int(down)), fault), int(examples), (int(correct), float(loss))
        if self.clients.setdefault(int(client), entry) != entry:
            raise ValueError("the rows of a client differ in traffic or fault")
        if total_examples > 0:
            self.evaluated[model, split, phase] = self.evaluated.get((model, split, phase), 0) + 1
        self.end = end

    def agree(self, metrics: RoundMetrics, traffic_total: Traffic) -> bool:
        """Return whether traffic, evaluations and faults match a line of metrics.jsonl."""
        evaluated = {tuple(scope): stats.clients for scope, stats in metrics.accuracy.items()}
        faults = fault_counts({client: fault for client, (_, fault) in self.clients.items()})
        own = total(self.traffic.values()), traffic_total, self.evaluated, faults
        return own == (metrics.traffic, metrics.traffic_total, evaluated, dict(metrics.faults))


@dataclass(frozen=True, slots=True)
class Records:
    """The rounds that are complete and equal in both files, without gaps from round 0 or 1.

    Args:
        history: their metrics.
        traffic: the traffic of each round by client.
        ends: the byte offsets in metrics.jsonl and in per_client.csv at which each round ends.
        header_end: the byte offset in per_client.csv at which the header ends.
        lost: the other rounds in metrics.jsonl.
        reason: why the next round is not included; empty if there is none.
    """

    history: tuple[RoundMetrics, ...]
    traffic: tuple[Mapping[int, Traffic], ...]
    ends: tuple[tuple[int, int], ...]
    header_end: int
    lost: tuple[RoundMetrics, ...] = ()
    reason: str = ""

    @property
    def last(self) -> int:
        """Return the last round; 0 if there are none."""
        return self.history[-1].round if self.history else 0

    def until(self, last: int) -> Records:
        """Return the records of the rounds up to `last`.

        Raises:
            SettingsError: rounds are missing.
        """
        if self.last < last:
            raise SettingsError(
                f"the run cannot resume after round {last}: {METRICS} and {PER_CLIENT} are complete up to round "
                f"{self.last} only{f' ({self.reason})' if self.reason else ''}"
            )
        count = sum(metrics.round <= last for metrics in self.history)
        lost = (*self.history[count:], *self.lost)
        return Records(self.history[:count], self.traffic[:count], self.ends[:count], self.header_end, lost)

    def ledger(self) -> Ledger:
        """Return the traffic of all rounds."""
        ledger = Ledger()
        for traffic in self.traffic:
            ledger.add_traffic(traffic)
        return ledger


def read_records(folder: Path) -> Records:
    """Read both files of a run folder up to the first round that is incomplete or differs between them.

    Raises:
        SettingsError: a file is missing, or per_client.csv has other columns.
    """
    data = _contents(folder, PER_CLIENT)
    header = (",".join(COLUMNS) + "\n").encode()
    if not data.startswith(header):
        raise SettingsError(f"{folder / PER_CLIENT} does not begin with the line {','.join(COLUMNS)}")
    rows, bad_row = _rows(data, len(header))
    history: list[RoundMetrics] = []
    traffic: list[Mapping[int, Traffic]] = []
    ends: list[tuple[int, int]] = []
    lost: list[RoundMetrics] = []
    reason, rows_end, traffic_total = "", len(header), Traffic()
    for number, (metrics, end) in enumerate(_lines(_contents(folder, METRICS)), start=1):
        found = rows.get(metrics.round if metrics else -1) or _Rows(rows_end)
        traffic_total += total(found.traffic.values())
        if reason:
            pass
        elif metrics is None:
            reason = f"line {number} of {METRICS} cannot be read"
        elif metrics.round not in ((history[-1].round + 1,) if history else (0, 1)):
            reason = f"line {number} of {METRICS} is of round {metrics.round}"
        elif not found.agree(metrics, traffic_total):
            reason = f"{PER_CLIENT} does not match round {metrics.round}{bad_row}"
        else:
            rows_end = found.end
            history.append(metrics)
            traffic.append(found.traffic)
            ends.append((end, rows_end))
            continue
        if metrics is not None:
            lost.append(metrics)
    return Records(tuple(history), tuple(traffic), tuple(ends), len(header), tuple(lost), reason)


def cut(folder: Path, records: Records) -> None:
    """Truncate both files to these records, each atomically."""
    ends = records.ends[-1] if records.ends else (0, records.header_end)
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


def _rows(data: bytes, start: int) -> tuple[dict[int, _Rows], str]:
    """Return the rows by round, and a text that names the first invalid row. Stops there, or at rows of newcomers."""
    rounds: dict[int, _Rows] = {}
    end, latest = start, 0
    for number, line in enumerate(data[start:].split(b"\n")[:-1], start=2):
        try:
            cells = line.decode().split(",")
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
