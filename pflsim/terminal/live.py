"""A display that stays up to date while a run goes on, on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Group

REFRESHES = 2
"""A second: often enough to be followed, and less than a hundredth of a core."""
PHASES = {
    "start": "starting",
    "initial round": "initial round",
    "downlink": "sending",
    "train": "training",
    "fuse": "fusing",
    "trace": "writing messages",
    "evaluate": "evaluating",
    "checkpoint": "saving",
    "newcomers": "newcomers",
}


@dataclass(slots=True)
class Status:
    """What the display shows.

    Args:
        rounds: how many are planned.
        round: the one that is going on; 0 before the first.
        phase: of it, by its name in the records.
        done, due: clients that are through with the phase, of so many; due 0: not counted.
        remaining: seconds to the end at the beginning of the round; None: not known.
        lines: what else there is to say, below.
    """

    rounds: int
    round: int = 0
    phase: str = "start"
    done: int = 0
    due: int = 0
    remaining: float | None = None
    lines: list[str] = field(default_factory=list)


class Live:
    """Keeps the status in the last lines of a terminal; what is printed meanwhile appears above it.

    Args:
        status: is looked at again and again.
        stream: the terminal.
        width: columns.
        duration: how seconds are written.
    """

    def __init__(self, status: Status, stream: TextIO, width: int, duration: Callable[[float], str]):
        from rich.console import Console
        from rich.live import Live as RichLive

        self.status, self._duration = status, duration
        self._round, self._since = 0, time.monotonic()
        self._begun = time.monotonic()
        console = Console(file=stream, width=width, highlight=False, force_terminal=True)
        self._console = console
        self._live = RichLive(
            console=console, get_renderable=self._shown, refresh_per_second=REFRESHES, transient=True, screen=False
        )
        self._live.start()

    def print(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._live.refresh()  # or what is below would be older than the line

    def stop(self) -> None:
        """Take the display away."""
        self._live.stop()

    def _shown(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now, status = time.monotonic(), self.status
        if status.round != self._round:
            self._round, self._since = status.round, now
        share = status.done / status.due if status.due else 0.0
        done = max(status.round - 1, 0) + (share if status.phase == "train" else 0.0)
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(f"round {status.round}/{status.rounds}" if status.round else "       ", style="bold"),
            ProgressBar(total=status.rounds, completed=done, width=30),
            Text(self._phase()),
            Text(self._time(now), style="dim"),
        )
        return Group(row, *(Text(line, no_wrap=True, overflow="ellipsis") for line in status.lines))

    def _phase(self) -> str:
        status = self.status
        counted = f" {status.done} of {status.due} clients" if status.due else ""
        return f"{PHASES.get(status.phase, status.phase)}{counted}"

    def _time(self, now: float) -> str:
        passed = f"{self._duration(now - self._begun)} passed"
        if self.status.remaining is None:
            return passed
        left = max(self.status.remaining - (now - self._since), 0.0)
        return f"{passed}, {self._duration(left)} to go"
