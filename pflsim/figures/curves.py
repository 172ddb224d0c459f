"""Line charts with bands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_INSIDE = 6
"""With more curves, the legend is beside the axes and the bands are fainter."""
LINE_HEIGHT = 0.2
"""Height of a legend entry in inches."""
DASHES = ("-", "--", ":", "-.")


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


def draw_curves(
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    title: str = "",
    size: tuple[float, float] = (4.8, 3.2),
    legend: bool = True,
) -> Figure:
    """Draw curves into a matplotlib `Figure`.

    The colours are matplotlib's cycle of ten; each further ten curves have another line style. A single point is drawn
    as a dot.

    Args:
        curves: the curves in the order of the legend.
        x_label: label of the x axis.
        y_label: label of the y axis.
        title: title of the axes.
        size: width and height in inches, without a legend beside the axes.
        legend: whether to draw a legend if there are several curves.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    many = len(curves) > MAX_INSIDE
    columns = math.ceil(len(curves) / max(1, int(size[1] / LINE_HEIGHT) - 1)) if many and legend else 0
    longest = max((len(curve.label) for curve in curves), default=0)
    figure = Figure(figsize=(size[0] + columns * (0.075 * longest + 0.5), size[1]), layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        colour, dashes = f"C{number % 10}", DASHES[number // 10 % len(DASHES)]
        marker = "o" if len(curve.x) == 1 else None
        axes.plot(curve.x, curve.y, color=colour, linestyle=dashes, marker=marker, linewidth=1.4, label=curve.label)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.08 if many else 0.18, linewidth=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if all(float(x).is_integer() for curve in curves for x in curve.x):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    if columns:
        figure.legend(loc="outside right upper", ncols=columns, fontsize="small", frameon=False)
    elif legend and len(curves) > 1:
        axes.legend(fontsize="small", framealpha=0.6)
    if title:
        axes.set_title(title, fontsize="medium")
    return figure
