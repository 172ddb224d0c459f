"""Pictures that are drawn while a run goes on, in little of its time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pflsim.figures.heatmaps import by_kind, draw_heatmaps
from pflsim.run_folder.diagnostics import Diagnostics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARE = 0.01
"""The most of a run's time that drawing may take."""
FIRST = 0.3
"""Seconds that the first pictures are expected to take."""


class Gallery:
    """Draws a round's matrices; a round is passed over where earlier pictures have taken their share of the time, but
    the last ones are drawn at the end.

    Args:
        put: takes each picture: its kind, the figure, the round.
        clock: seconds.
    """

    def __init__(self, put: Callable[[str, Figure, int], None], clock: Callable[[], float] = time.perf_counter):
        self._put, self._clock = put, clock
        self._start, self._spent, self._expected = clock(), 0.0, FIRST
        self._waiting: Diagnostics | None = None

    def show(self, diagnostics: Diagnostics) -> None:
        """Draw a round, now or never, or at the end if no other round comes."""
        self._waiting = diagnostics
        if self._spent + self._expected <= SHARE * (self._clock() - self._start):
            self._draw()

    def close(self) -> None:
        """Draw what was shown last, if it is not."""
        self._draw()

    def _draw(self) -> None:
        diagnostics, self._waiting = self._waiting, None
        if diagnostics is None:
            return
        begun = self._clock()
        try:
            for kind, matrices in by_kind(diagnostics.matrices).items():
                self._put(
                    kind, draw_heatmaps(matrices, f"{matrices[0].title}, round {diagnostics.round}"), diagnostics.round
                )
        except (
            ValueError,
            TypeError,
            RuntimeError,
            ArithmeticError,
            LookupError,
        ) as error:  # no run ends for a picture
            print(
                f"warning: matrices of round {diagnostics.round} could not be drawn: {error}",
                file=sys.stderr,
                flush=True,
            )
        self._expected = self._clock() - begun
        self._spent += self._expected
