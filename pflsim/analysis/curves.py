"""Line charts, and the curves of groups over their seeds."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from pflsim.analysis.comparison import Comparison, both_ways
from pflsim.analysis.groups import Group
from pflsim.analysis.runs import Run
from pflsim.analysis.tables import title
from pflsim.records.heatmaps import drawing
from pflsim.records.history import RoundMetrics
from pflsim.terminal.formats import byte_unit, in_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Against = Literal["rounds", "bytes", "seconds"]
Measure = Callable[[Run, RoundMetrics], float | None]
"""Returns the value to draw for a round of a run, or None to leave the round out."""
SUFFIXES = (".png", ".svg", ".pdf")
BAND = "mean ± sample standard deviation over seeds"
"""The line and the band of a curve."""
DASHES = ("-", "--", ":", "-.")
MAX_POINTS = 400
"""Longer curves are thinned out to this number of points."""


def of_test(figure: str = "mean") -> Measure:
    """Return a measure of the reported model on test data: a field of `Stats` of the primary metric."""

    def measure(run: Run, line: RoundMetrics) -> float | None:
        found = line.evaluations.get(run.reported)
        return found and getattr(found.primary, figure)

    return measure


def seed_points(group: Group, against: Against, measure: Measure) -> np.ndarray:
    """Return x and y of every run at the rounds that all runs of a group have, [runs, rounds, 2]."""
    by_run = [_points(run, against, measure) for run in group.runs]
    rounds = sorted(set.intersection(*map(set, by_run)))
    if len(rounds) > MAX_POINTS:
        rounds = [rounds[n] for n in np.linspace(0, len(rounds) - 1, MAX_POINTS).round().astype(int)]
    return np.array([[found[number] for number in rounds] for found in by_run]).reshape(len(by_run), -1, 2)


def curve(group: Group, against: Against, measure: Measure) -> Curve:
    """Return the curve of a group (`BAND`), at the rounds that all runs have.

    The x values are means over the seeds too: rounds, bytes of all clients in both directions, or wall seconds.
    """
    points = seed_points(group, against, measure)
    x, y = points.mean(0).T  # [runs, rounds, 2] -> [rounds] each
    if len(points) == 1:
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
    """Write the curves of the primary metric of all groups to a picture."""
    curves, x_label = curves_of(comparison.groups, against, of_test())
    band = f"; {BAND}" if any(len(group.runs) > 1 for group in comparison.groups) else ""
    with drawing():
        figure = draw_curves(curves, x_label, f"test {in_text(comparison.primary)}", (6.0, 4.0))
        figure.set_layout_engine("none")  # `bbox_inches` makes room for the legend
        figure.axes[0].set_title("\n".join(textwrap.wrap(title(comparison) + band, 64)), fontsize="medium")
        figure.axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", frameon=False)
        figure.savefig(path, dpi=150, bbox_inches="tight")


def _points(run: Run, against: Against, measure: Measure) -> dict[int, tuple[float, float]]:
    """Return x and y by round."""
    xs: Sequence[float] = {
        "rounds": [line.round for line in run.history],
        "bytes": [both_ways(line.traffic_total) for line in run.history],
        "seconds": list(accumulate(line.total_seconds for line in run.history)),
    }[against]
    found = ((line.round, x, measure(run, line)) for x, line in zip(xs, run.history, strict=True))
    return {number: (x, y) for number, x, y in found if y is not None}


@dataclass(frozen=True)
class Curve:
    """A curve, optionally with a band.

    Args:
        label: its name in the legend.
        x: x values.
        y: y values; a value that is not finite leaves a gap.
        low: lower edge of the band at the same points; None: no band.
        high: upper edge of the band.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def draw_curves(curves: Sequence[Curve], x_label: str, y_label: str, size: tuple[float, float]) -> Figure:
    """Draw curves into a matplotlib `Figure`, without a legend.

    The colours are matplotlib's cycle of ten; each further ten curves have another line style. A single point is drawn
    as a dot.

    Args:
        curves: the curves.
        x_label: label of the x axis.
        y_label: label of the y axis.
        size: width and height in inches.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        colour, dashes = f"C{number % 10}", DASHES[number // 10 % len(DASHES)]
        marker = "o" if len(curve.x) == 1 else None
        axes.plot(curve.x, curve.y, color=colour, linestyle=dashes, marker=marker, linewidth=1.4, label=curve.label)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if all(float(x).is_integer() for curve in curves for x in curve.x):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    return figure
