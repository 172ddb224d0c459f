"""The live display of a running experiment."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from pflsim.terminal.formats import format_seconds

if TYPE_CHECKING:
    from rich.console import Group

REFRESHES_PER_S = 2
"""At this rate, the display takes less than 1% of a core."""
MIN_BAR = 6
"""On terminals with less room, there is no progress bar."""
PHASES = {
    "start": "starting",
    "downlink": "sending",
    "train": "training",
    "fuse": "fusing",
    "trace": "writing trace",
    "evaluate": "evaluating",
    "checkpoint": "saving",
}


@dataclass(slots=True)
class Status:
    """The values that the display shows.

    Args:
        rounds: number of planned rounds.
        round: the current round; 0 before the first.
        phase: the current phase; `PHASES` has the texts of those that are shown by another name.
        done: number of clients that have finished the phase.
        due: number of clients in the phase; 0: not counted.
        remaining: estimated seconds to the end at the start of the round; None: unknown.
        lines: further lines below the progress bar.
    """

    rounds: int
    round: int = 0
    phase: str = "start"
    done: int = 0
    due: int = 0
    remaining: float | None = None
    lines: list[str] = field(default_factory=list)


class Live:
    """Shows the status in the last lines of a terminal; printed lines appear above it.

    Args:
        status: the status, read at every refresh.
        stream: the terminal.
        width: number of columns.
    """

    def __init__(self, status: Status, stream: TextIO, width: int):
        from rich.console import Console
        from rich.live import Live as RichLive

        self.status, self._round = status, 0
        self._begun = self._since = time.monotonic()
        self._console = Console(file=stream, width=width, highlight=False, force_terminal=True)
        self._live = RichLive(
            console=self._console,
            get_renderable=self._shown,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            screen=False,
        )
        self._live.start()

    def print(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._live.refresh()  # so that the display is not older than the line

    def stop(self) -> None:
        """Remove the display."""
        self._live.stop()

    def _shown(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now, status = time.monotonic(), self.status
        if status.round != self._round:
            self._round, self._since = status.round, now
        share = status.done / status.due if status.due and status.phase == "train" else 0.0
        phase = PHASES.get(status.phase, status.phase)
        phase += f" {status.done} of {status.due} clients" if status.due else ""
        elapsed = f"{format_seconds(now - self._begun)} elapsed"
        if status.remaining is not None:
            elapsed += f", {format_seconds(max(status.remaining - (now - self._since), 0.0))} left"
        place = f"round {status.round}/{status.rounds}  " if status.round else ""
        room = self._console.width - len(place) - len(phase) - len(elapsed) - 4
        if room < MIN_BAR:  # the line wraps between words
            return Group(*map(Text, (f"{place}{phase}  {elapsed}", *status.lines)))
        row = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(status.rounds, max(status.round - 1, 0) + share, width=min(room, 30))
        row.add_row(Text(place.rstrip(), style="bold"), bar, Text(phase), Text(elapsed, style="dim"))
        return Group(row, *map(Text, status.lines))
