"""Matrices as heat maps."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pflsim.types import Axis, Matrix

SIDE = 2.6
"""Inches of a map's longer side."""
ALONG = 4
"""Maps beside each other, at most."""


def by_kind(matrices: Iterable[Matrix]) -> dict[str, list[Matrix]]:
    """Those that are drawn together: α of every layer, for example."""
    kinds: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        kinds.setdefault(matrix.name.partition("/")[0], []).append(matrix)
    return kinds


def draw_heatmaps(matrices: Sequence[Matrix], title: str = "") -> Any:
    """Draw matrices of one kind beside each other, on one scale: a matplotlib `Figure`.

    Args:
        matrices: at least one; each with a title of its own where there are several.
        title: above all; none: the matrix's own where there is one.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    along = min(len(matrices), ALONG)
    down = math.ceil(len(matrices) / along)
    rows, columns = (max(m.values.shape[side] for m in matrices) for side in (0, 1))
    wide, high = SIDE * max(columns / rows, 1.0), SIDE * max(rows / columns, 1.0)
    wide, high = min(wide, 2.5 * SIDE), min(high, 2.5 * SIDE)
    figure = Figure(figsize=(along * (wide + 0.55) + 0.9, down * (high + 0.75) + 0.35), layout="constrained")
    FigureCanvasAgg(figure)
    low, high_end = _bounds(matrices)
    image: Any = None
    colours = colormaps["viridis"].with_extremes(over="#fff4c2")
    for number, matrix in enumerate(matrices):
        axes = figure.add_subplot(down, along, number + 1)
        shown = np.ma.masked_invalid(matrix.values)
        image = axes.imshow(shown, cmap=colours, vmin=low, vmax=high_end, interpolation="nearest", aspect="auto")
        axes.set_facecolor("#d9d9d9")  # where there is nothing
        if len(matrices) > 1:
            axes.set_title(matrix.name.partition("/")[2] or matrix.title, fontsize=9)
        _label(axes.xaxis, matrix.columns, matrix.values.shape[1], turned=True)
        _label(axes.yaxis, matrix.rows, matrix.values.shape[0])
        axes.tick_params(labelsize=7)
        if matrix.values.size <= 144:
            _write_values(axes, matrix.values, low, high_end)
    beyond = any(np.nanmax(m.values, initial=low) > high_end for m in matrices)
    bar = figure.colorbar(image, ax=figure.axes, shrink=0.9, pad=0.02, extend="max" if beyond else "neither")
    bar.ax.tick_params(labelsize=7)
    letters = int(14 * figure.get_figwidth())  # that fit beside each other
    figure.suptitle("\n".join(textwrap.wrap(title or matrices[0].title, letters)), fontsize=10)
    return figure


def _bounds(matrices: Sequence[Matrix]) -> tuple[float, float]:
    """The scale; between clients it is that of different ones, for a client's own weight may dwarf all others.

    Weights begin at 0, which is where nothing is given; similarities need not come near it.
    """
    if matrices[0].bounds is not None:
        return matrices[0].bounds
    shown = [_others(m) if _own(m) else m.values for m in matrices]
    values = np.concatenate([v[np.isfinite(v)] for v in shown])
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    return (min(low, 0.0) if matrices[0].rows.label == "receiver" else low), high


def _own(matrix: Matrix) -> bool:
    """Whether the diagonal is about a client and itself."""
    return matrix.rows.label in ("receiver", "client") and 1 < len(matrix.values) == matrix.values.shape[1]


def _others(matrix: Matrix) -> np.ndarray:
    return matrix.values[~np.eye(len(matrix.values), dtype=bool)]


def _label(axis: Any, what: Axis, size: int, turned: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_label_text(what.label, fontsize=8)
    if what.names and size <= 40:
        long = turned and max(map(len, what.names)) * size > 30
        axis.set_ticks(range(size), what.names, rotation=90 if long else 0)
    else:
        axis.set_major_locator(MaxNLocator(min(size, 10), integer=True))


def _write_values(axes: Any, values: np.ndarray, low: float, high: float) -> None:
    middle = (low + high) / 2
    for row, column in np.ndindex(values.shape):
        value = values[row, column]
        if np.isfinite(value):
            colour = "black" if value > middle else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
