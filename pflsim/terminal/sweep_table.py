"""The live display of a sweep: a table with a row for every run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pflsim.display.formats import flowed, format_bytes, format_seconds, plural
from pflsim.terminal.status import Status, read_status, sparkline, watching

RATE = 2
"""Refreshes per second."""
NAME, SPARK = 16, 8
"""Least columns of a run's name and of a sparkline."""
HEADERS = ("round", "now", "best", "worst", "", "a round", "left", "bytes")
"""The column of sparklines has no header."""
DROPPED = ("bytes", "a round", "", "worst")
"""Columns that a narrow terminal leaves out, the first one first."""
STYLES = {"waiting": "dim", "failed": "red"}


class SweepTable:
    """Context manager that shows the runs of a sweep or a study, if standard output is a terminal.

    Args:
        names: of the runs; without any, nothing is shown.
        shown: whether to show anything.
        terminal: where to; default: standard output.
    """

    def __init__(self, names: Sequence[str], shown: bool, terminal: Console | None = None):
        self._terminal = terminal or Console(file=sys.stdout, highlight=False)
        self.shown = bool(names) and shown and self._terminal.file.isatty()  # not is_terminal, which FORCE_COLOR sets
        self.names, self._states = [*names], ["waiting"] * len(names)
        self._statuses: dict[int, Status] = {}
        self._folder: TemporaryDirectory[str] | None = None
        self._begun = time.monotonic()
        rows = self.rows if self.names else None  # Live draws once when it is built
        self._live = Live(console=self._terminal, get_renderable=rows, refresh_per_second=RATE, transient=True)

    def __enter__(self) -> SweepTable:
        if self.shown:
            self._folder = TemporaryDirectory(prefix="pflsim-")
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        if self._folder:
            self._folder.cleanup()

    def path(self, number: int) -> Path | None:
        """Return the file into which a run in another process writes its status; None if nothing is shown."""
        return Path(self._folder.name, f"{number}.json") if self._folder else None

    @contextmanager
    def running(self, number: int) -> Iterator[None]:
        """Show a run of this process."""
        token = watching.set(partial(self._statuses.__setitem__, number) if self.shown else None)
        self._states[number] = "running"
        try:
            yield
        finally:
            watching.reset(token)

    def ended(self, number: int, failed: bool = False) -> None:
        """Mark a run as done or failed."""
        self._states[number] = "failed" if failed else "done"

    def rows(self) -> Group:
        """Return the table, of many runs those around the first that has not ended, and what is left of the sweep."""
        for number in range(len(self.names)):
            if (path := self.path(number)) and (found := read_status(path)):
                self._statuses[number] = found
                if self._states[number] == "waiting":
                    self._states[number] = "running"
        ended = [state in ("done", "failed") for state in self._states]
        room = max(self._terminal.height - 4, 3)
        current = ended.index(False) if False in ended else len(ended)
        first = max(0, min(current - room // 3, len(ended) - room))
        table = self._table(range(first, min(first + room, len(ended))))
        parts = [1.0 if end else self._part(number) for number, end in enumerate(ended)]
        elapsed, share = time.monotonic() - self._begun, sum(parts) / len(parts)
        items = [f"{sum(ended)} of {plural(len(ended), 'run')} done", f"{format_seconds(elapsed)} elapsed"]
        chosen = {status.by_validation for status in self._statuses.values() if status.best is not None}
        if len(chosen) == 1:
            items.append("best: by validation" if chosen.pop() else "best: on test data (oracle)")
        if 0 < share < 1:
            items.append(f"{format_seconds(elapsed * (1 - share) / share)} left")
        return Group(table, *(Text(line, style="dim") for line in flowed(items, self._terminal.width)))

    def _part(self, number: int) -> float:
        status = self._statuses.get(number)
        return status.round / status.rounds if status else 0.0

    def _table(self, numbers: Sequence[int]) -> Table:
        """Return the table of some runs, with the columns that the terminal has room for."""
        found = [self._cells(number) for number in numbers]
        columns = {header: [cells[n] for cells in found] for n, header in enumerate(HEADERS)}
        wide = {header: max([len(header), *map(len, cells)]) for header, cells in columns.items()} | {"": SPARK}
        longest = max(len(self.names[number]) for number in numbers)
        for header in DROPPED:
            if self._free(wide) < min(longest, NAME):
                del wide[header]
        free = self._free(wide)
        if "" in wide:  # the sparkline takes what the names leave
            longest_run = max((status.rounds for status in self._statuses.values()), default=0)
            wide[""] = min(SPARK + max(free - longest, 0), max(longest_run, SPARK))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("run", no_wrap=True, width=min(max(free, 3), longest))
        for header, size in wide.items():
            table.add_column(header, justify="right" if header else "left", no_wrap=True, width=size)
        for n, number in enumerate(numbers):
            if "" in wide and (status := self._statuses.get(number)):
                columns[""][n] = sparkline(status.values, wide[""])
            cells = (columns[header][n] for header in wide)
            table.add_row(self.names[number], *cells, style=STYLES.get(self._states[number], ""))
        return table

    def _free(self, wide: Mapping[str, int]) -> int:
        """Return the columns of the terminal that are left for names."""
        return self._terminal.width - sum(wide.values()) - 2 * len(wide)

    def _cells(self, number: int) -> list[str]:
        """Return the cells of a run by `HEADERS`, without the sparkline."""
        status, state = self._statuses.get(number), self._states[number]
        if status is None:
            return ["", "", "", "", "", "", state, ""]
        place, traffic = f"{status.round}/{status.rounds}", format_bytes(status.up + status.down)
        now = f"{status.values[-1]:.3f}" if status.values else ""
        best = "" if status.best is None else f"{status.best:.3f}"
        worst = f"{status.worst:.3f}" if status.values else ""
        took = "" if status.seconds is None else format_seconds(status.seconds)
        left = format_seconds(status.left) if status.left and state == "running" else state
        return [place, now, best, worst, "", took, left, traffic]
