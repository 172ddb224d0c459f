"""The curves of groups: the primary metric of every run by round, bytes or seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

import numpy as np

from pflsim.analysis.comparison import both_ways
from pflsim.analysis.groups import Group
from pflsim.analysis.runs import Run
from pflsim.records.history import RoundMetrics

Against = Literal["rounds", "bytes", "seconds"]
Measure = Callable[[Run, RoundMetrics], float | None]
"""Returns the value to draw for a round of a run, or None to leave the round out."""
MAX_POINTS = 400
"""Longer curves are thinned out to this number of points."""


def of_test(figure: str = "mean") -> Measure:
    """Return a measure of the reported model on test data: a field of `Stats` of the primary metric."""

    def measure(run: Run, line: RoundMetrics) -> float | None:
        found = line.evaluations.get(run.reported)
        return found and getattr(found.primary, figure)

    return measure


def seed_points(group: Group, against: Against, measure: Measure) -> np.ndarray:
    """Return x and y of every run at the rounds that all runs of a group have, [runs, rounds, 2].

    x is the round, the bytes of all clients in both directions so far, or the wall seconds so far.
    """
    by_run = [_points(run, against, measure) for run in group.runs]
    rounds = sorted(set.intersection(*map(set, by_run)))
    if len(rounds) > MAX_POINTS:
        rounds = [rounds[n] for n in np.linspace(0, len(rounds) - 1, MAX_POINTS).round().astype(int)]
    return np.array([[found[number] for number in rounds] for found in by_run]).reshape(len(by_run), -1, 2)


def _points(run: Run, against: Against, measure: Measure) -> dict[int, tuple[float, float]]:
    """Return x and y by round."""
    xs: Sequence[float] = {
        "rounds": [line.round for line in run.history],
        "bytes": [both_ways(line.traffic_total) for line in run.history],
        "seconds": list(accumulate(line.total_seconds for line in run.history)),
    }[against]
    found = ((line.round, x, measure(run, line)) for x, line in zip(xs, run.history, strict=True))
    return {number: (x, y) for number, x, y in found if y is not None}
