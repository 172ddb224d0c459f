"""metrics.jsonl and per_client.csv read back, so that a run can go on writing them."""

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
    """What per_client.csv says of one round; `end` is where its rows end, in bytes."""

    end: int
    clients: dict[int, tuple[Traffic, str]] = field(default_factory=dict)
    traffic: dict[int, Traffic] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    counted: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def add(self, cells: list[str], end: int) -> None:
        _, client, split, model, phase, correct, examples, loss, up, down, fault = cells
        traffic, number = Traffic(int(up), int(down)), int(client)
        if self.clients.setdefault(number, (traffic, fault)) != (traffic, fault):
            raise ValueError("bytes and fault of a client are the same in all its rows of a round")
        _ = int(correct), float(loss)  # to see that they are numbers
        if int(examples) > 0:
            scope = model, split, phase
            self.counted[scope] = self.counted.get(scope, 0) + 1
        if traffic != Traffic():
            self.traffic[number] = traffic
        if fault:
            self.faults[number] = fault
        self.end = end


@dataclass(frozen=True, slots=True)
class Records:
    """The rounds of a run that are whole in both files, and agree; from round 0 or 1 without a gap.

    Args:
        history: their lines in metrics.jsonl.
        traffic: each round's bytes by client.
        ends: where each round ends in metrics.jsonl and in per_client.csv, in bytes.
        header_end: where the first line of per_client.csv ends.
        lost: lines of metrics.jsonl beyond them.
        reason: what is wrong with the round that comes next, where something is.
    """

    history: tuple[RoundMetrics, ...]
    traffic: tuple[Mapping[int, Traffic], ...]
    ends: tuple[tuple[int, int], ...]
    header_end: int
    lost: tuple[RoundMetrics, ...] = ()
    reason: str = ""

    @property
    def last(self) -> int:
        """The last whole round; 0 without any."""
        return self.history[-1].round if self.history else 0

    def until(self, last: int) -> Records:
        """The same without the rounds after `last`.

        Raises:
            SettingsError: there are fewer.
        """
        if self.last < last:
            raise SettingsError(
                f"the run cannot continue after round {last}, for {METRICS} and {PER_CLIENT} are whole up to round "
                f"{self.last} only{f' ({self.reason})' if self.reason else ''}"
            )
        count = sum(metrics.round <= last for metrics in self.history)
        lost = (*self.history[count:], *self.lost)
        return Records(self.history[:count], self.traffic[:count], self.ends[:count], self.header_end, lost)

    def ledger(self) -> Ledger:
        """All bytes so far."""
        return Ledger.of(self.traffic)


def read_records(folder: Path) -> Records:
    """Read both files of a run folder, as far as they are whole and agree.

    Raises:
        SettingsError: one of them is missing, or per_client.csv has other columns.
    """
    data = _contents(folder, PER_CLIENT)
    header = (",".join(COLUMNS) + "\n").encode()
    if not data.startswith(header):
        raise SettingsError(f"{folder / PER_CLIENT} does not begin with the line {','.join(COLUMNS)}")
    rows, torn = _rows(data, len(header))
    history: list[RoundMetrics] = []
    traffic: list[Mapping[int, Traffic]] = []
    ends: list[tuple[int, int]] = []
    lost: list[RoundMetrics] = []
    reason, rows_end, so_far = "", len(header), Traffic()
    for number, (metrics, end) in enumerate(_lines(_contents(folder, METRICS)), start=1):
        found = rows.get(metrics.round if metrics else -1) or _Rows(rows_end)
        so_far += total(found.traffic.values())
        if reason:
            pass
        elif metrics is None:
            reason = f"line {number} of {METRICS} cannot be read"
        elif metrics.round not in ((history[-1].round + 1,) if history else (0, 1)):
            reason = f"line {number} of {METRICS} is of round {metrics.round}"
        elif not _agree(metrics, found, so_far):
            reason = f"{PER_CLIENT} has not all of round {metrics.round}{torn}"
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
    """Shorten both files to these records, each at once."""
    lines_end, rows_end = records.ends[-1] if records.ends else (0, records.header_end)
    for name, end in ((METRICS, lines_end), (PER_CLIENT, rows_end)):
        data = _contents(folder, name)
        if len(data) > end:
            write_atomically(folder / name, data[:end])


def _contents(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise SettingsError(f"the run cannot continue: {folder / name} cannot be read: {error.strerror}") from error


def _lines(data: bytes) -> Iterator[tuple[RoundMetrics | None, int]]:
    """Every whole line, None where it cannot be read, with where it ends."""
    end = 0
    for line in data.split(b"\n")[:-1]:  # what follows the last line end was cut off in the middle
        end += len(line) + 1
        try:
            yield from_line(line.decode()), end
        except (ValueError, KeyError, TypeError, AttributeError):
            yield None, end


def _rows(data: bytes, start: int) -> tuple[dict[int, _Rows], str]:
    """Whole rows by round, up to the newcomers' and the first that cannot be read; and the words for the latter."""
    rounds: dict[int, _Rows] = {}
    end, latest = start, 0
    for number, line in enumerate(data[start:].split(b"\n")[:-1], start=2):
        try:
            cells = line.decode().split(",")
            round_number = int(cells[0])
            if round_number < latest:
                raise ValueError("rounds ascend")
            if cells[3] == "newcomer":
                break
            end += len(line) + 1
            rounds.setdefault(round_number, _Rows(end)).add(cells, end)
            latest = round_number
        except (ValueError, IndexError):
            return rounds, f": line {number} cannot be read"
    return rounds, ""


def _agree(metrics: RoundMetrics, rows: _Rows, so_far: Traffic) -> bool:
    """Whether the rows are those that the line was made of, as far as counts tell."""
    counted = {tuple(scope): stats.clients for scope, stats in metrics.accuracy.items()}
    sent = total(rows.traffic.values())
    return (
        (sent, so_far) == (metrics.traffic, metrics.traffic_total)
        and rows.counted == counted
        and fault_counts(rows.faults) == dict(metrics.faults)
    )
