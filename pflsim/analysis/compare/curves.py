"""Curves of groups over their seeds."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from pflsim.analysis.compare.comparison import Comparison, both_ways
from pflsim.analysis.compare.tables import title
from pflsim.analysis.results import Group, Run
from pflsim.figures.curves import Curve, draw_curves
from pflsim.records.history import RoundMetrics
from pflsim.terminal.formats import byte_unit

Against = Literal["rounds", "bytes", "seconds"]
AGAINST: tuple[Against, ...] = get_args(Against)
Measure = Callable[[Run, RoundMetrics], float | None]
"""Returns the value to draw for a round of a run, or None to leave the round out."""
SUFFIXES = (".png", ".svg", ".pdf")
BAND = "mean ± sample standard deviation over seeds"
"""The line and the band of a curve."""
MAX_POINTS = 400
"""Longer curves are thinned out to this number of points."""


def accuracy(figure: str = "mean") -> Measure:
    """Return a measure of the reported model's test accuracy: a field of `AccuracyStats`."""
    return lambda run, line: getattr(line.accuracy[run.reported], figure) if run.reported in line.accuracy else None


def curve(group: Group, against: Against, measure: Measure) -> Curve:
    """Return the curve of a group (`BAND`), at the rounds that all runs have.

    The x values are means over the seeds too: rounds, bytes of all clients in both directions, or wall seconds.
    """
    by_run = [_points(run, against, measure) for run in group.runs]
    rounds = sorted(set.intersection(*map(set, by_run)))
    if len(rounds) > MAX_POINTS:
        rounds = [rounds[n] for n in np.linspace(0, len(rounds) - 1, MAX_POINTS).round().astype(int)]
    points = np.array([[found[number] for number in rounds] for found in by_run]).reshape(len(by_run), -1, 2)
    x, y = points.mean(0).T  # [runs, rounds, 2] -> [rounds] each
    if len(by_run) == 1:
        return Curve(group.label, x.tolist(), y.tolist())
    std = points[:, :, 1].std(0, ddof=1)
    return Curve(group.label, x.tolist(), y.tolist(), (y - std).tolist(), (y + std).tolist())


def curves_of(groups: Iterable[Group], against: Against, measure: Measure) -> tuple[list[Curve], str]:
    """Return a curve for each group and the label of the x axis; bytes are scaled to a unit that fits all curves."""
    found = [curve(group, against, measure) for group in groups]
    if against != "bytes":
        return found, {"rounds": "round", "seconds": "seconds"}[against]
    unit, size = byte_unit(max((x for each in found for x in each.x), default=0.0))
    return [replace(each, x=[x / size for x in each.x]) for each in found], f"{unit}, both ways, all clients"


def draw(comparison: Comparison, path: Path, against: Against) -> None:
    """Write the accuracy curves of all groups to a picture."""
    curves, x_label = curves_of(comparison.groups, against, accuracy())
    band = f"; {BAND}" if any(len(group.runs) > 1 for group in comparison.groups) else ""
    head = "\n".join(textwrap.wrap(title(comparison) + band, 64))
    draw_curves(curves, x_label, "test accuracy", title=head, size=(6.0, 4.0)).savefig(path, dpi=150)


def _points(run: Run, against: Against, measure: Measure) -> dict[int, tuple[float, float]]:
    """Return x and y by round."""
    xs: Sequence[float] = {
        "rounds": [line.round for line in run.history],
        "bytes": [both_ways(line.traffic_total) for line in run.history],
        "seconds": list(accumulate(line.total_seconds for line in run.history)),
    }[against]
    found = ((line.round, x, measure(run, line)) for x, line in zip(xs, run.history, strict=True))
    return {number: (x, y) for number, x, y in found if y is not None}
