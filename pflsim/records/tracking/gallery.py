"""Draws diagnostics during a run within a time budget."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pflsim.records.diagnostics import Diagnostics
from pflsim.records.heatmaps import by_kind, draw_heatmaps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARE = 0.01
"""The maximum share of the run's time to spend on drawing."""
EXPECTED_S = 0.3
"""The expected seconds of the first drawing."""


class Gallery:
    """Draws the diagnostics of rounds as figures.

    Skips rounds while drawing exceeds its share of the time. The diagnostics of the last round are always drawn, at the
    end if necessary.

    Args:
        put: receives each figure's kind, the figure, and the round.
        clock: returns the time in seconds.
    """

    def __init__(self, put: Callable[[str, Figure, int], None], clock: Callable[[], float] = time.perf_counter):
        self._put, self._clock = put, clock
        self._start, self._spent, self._expected = clock(), 0.0, EXPECTED_S
        self._pending: Diagnostics | None = None

    def show(self, diagnostics: Diagnostics) -> None:
        """Draw diagnostics if there is time; otherwise keep them until `close` or the next call."""
        self._pending = diagnostics
        if self._spent + self._expected <= SHARE * (self._clock() - self._start):
            self.close()

    def close(self) -> None:
        """Draw the latest diagnostics if they are not drawn yet."""
        diagnostics, self._pending = self._pending, None
        if diagnostics is None:
            return
        start, number = self._clock(), diagnostics.round
        try:
            for kind, matrices in by_kind(diagnostics.matrices).items():
                self._put(kind, draw_heatmaps(matrices, f"{matrices[0].title}, round {number}"), number)
        except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
            # a failed drawing must not end the run
            print(f"warning: matrices of round {number} could not be drawn: {error}", file=sys.stderr, flush=True)
        self._expected = self._clock() - start
        self._spent += self._expected
