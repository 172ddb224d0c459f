"""Curves with bands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INSIDE = 6
"""So many curves have their legend inside; more, beside the axes, with fainter bands."""
LINE = 0.2
"""Inches from one line of a legend to the next."""
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Curve:
    """A curve and, where there is one, the band around it.

    Args:
        label: its name in the legend.
        x, y: its points; a value that is not finite is a gap.
        low, high: the band's edges at the same points; None: no band.
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
) -> Figure:
    """Draw curves into one pair of axes: a matplotlib `Figure`.

    The colours are matplotlib's cycle; after ten the lines change their dashes. A curve of one point is a dot.

    Args:
        curves: in the order of the legend, which there is none of for a single curve.
        x_label: what the horizontal axis shows.
        y_label: and the vertical one.
        title: above the axes.
        size: inches, without a legend beside the axes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    beside = len(curves) > INSIDE
    columns = math.ceil(len(curves) / max(1, int(size[1] / LINE) - 1)) if beside else 0
    longest = max((len(curve.label) for curve in curves), default=0)
    figure = Figure(figsize=(size[0] + columns * (0.075 * longest + 0.5), size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        colour, dashes = f"C{number % 10}", DASHES[number // 10 % len(DASHES)]
        marker = "o" if len(curve.x) == 1 else None
        axes.plot(curve.x, curve.y, color=colour, linestyle=dashes, marker=marker, linewidth=1.4, label=curve.label)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.08 if beside else 0.18, linewidth=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if all(float(x).is_integer() for curve in curves for x in curve.x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    if len(curves) > 1:
        if beside:
            figure.legend(loc="outside right upper", ncols=columns, fontsize="small", frameon=False)
        else:
            axes.legend(fontsize="small", framealpha=0.6)
    if title:
        axes.set_title(title, fontsize="medium")
    return figure
