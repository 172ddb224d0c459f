"""Matrices as heat maps."""

import math
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pflsim.records.evaluation import grouped
from pflsim.types import Axis, Matrix

SIDE = 2.6
"""Length of a map's shorter side in inches."""
MAX_COLUMNS = 4
"""Maximum number of maps beside each other."""
MAX_ANNOTATED = 144
"""Larger matrices are drawn without numbers in their cells."""
MAX_TICKS = 40
"""Longer axes show a few numbers instead of all names."""


@contextmanager
def drawing() -> Iterator[None]:
    """Give matplotlib its defaults, whatever a matplotlibrc or the calling program sets, and silence missing glyphs."""
    from matplotlib import style

    with style.context("default"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        yield


def by_kind(matrices: Iterable[Matrix]) -> dict[str, list[Matrix]]:
    """Return matrices by the part of their name before the slash, e.g. `alpha` of every layer."""
    return grouped((matrix.name.partition("/")[0], matrix) for matrix in matrices)


def draw_heatmaps(matrices: Sequence[Matrix], title: str = "") -> Any:
    """Draw matrices of one kind with a common colour scale into a matplotlib `Figure`.

    Args:
        matrices: at least one.
        title: title of the figure.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    along = min(len(matrices), MAX_COLUMNS)
    down = math.ceil(len(matrices) / along)
    rows, columns = (max(m.values.shape[side] for m in matrices) for side in (0, 1))
    wide, high = (SIDE * min(max(ratio, 1.0), 2.5) for ratio in (columns / rows, rows / columns))
    figure = Figure(figsize=(along * (wide + 0.55) + 0.9, down * (high + 0.75) + 0.35), layout="constrained")
    FigureCanvasAgg(figure)  # TensorBoard reads the pixels of this canvas
    low, top = _bounds(matrices)
    image: Any = None
    colours = colormaps["viridis"].with_extremes(over="#fff4c2", bad="#8f959d")
    for number, matrix in enumerate(matrices):
        axes = figure.add_subplot(down, along, number + 1)
        shown = np.ma.masked_invalid(matrix.values)
        image = axes.imshow(shown, cmap=colours, vmin=low, vmax=top, interpolation="none", aspect="auto")
        if len(matrices) > 1:
            axes.set_title(matrix.name.partition("/")[2] or matrix.title, fontsize=9)
        _label(axes.xaxis, matrix.columns, matrix.values.shape[1], rotate=True)
        _label(axes.yaxis, matrix.rows, matrix.values.shape[0])
        axes.tick_params(labelsize=7)
        if matrix.values.size <= MAX_ANNOTATED:
            _write_values(axes, matrix.values, low, top)
    beyond = any(np.nanmax(m.values, initial=low) > top for m in matrices)
    bar = figure.colorbar(image, ax=figure.axes, shrink=0.9, pad=0.02, extend="max" if beyond else "neither")
    bar.ax.tick_params(labelsize=7)
    if title:
        figure.suptitle(textwrap.fill(title, int(14 * figure.get_figwidth())), fontsize=10)
    return figure


def _bounds(matrices: Sequence[Matrix]) -> tuple[float, float]:
    """Return the limits of the colour scale.

    Scales of weights start at 0; scales of similarities start at the smallest value. The diagonals of matrices between
    clients do not count.
    """
    if matrices[0].bounds is not None:
        return matrices[0].bounds
    shown = [m.values for m in matrices]
    if matrices[0].rows.label in ("receiver", "client"):  # a client's weight on itself can exceed all others
        shown = [v[~np.eye(len(v), dtype=bool)] if 1 < len(v) == v.shape[1] else v for v in shown]
    values = np.concatenate([v[np.isfinite(v)] for v in shown])
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    return (min(low, 0.0) if matrices[0].rows.label == "receiver" else low), high


def _label(axis: Any, what: Axis, size: int, rotate: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_label_text(what.label, fontsize=8)
    if what.names and size <= MAX_TICKS:
        long = rotate and max(map(len, what.names)) * size > 30
        axis.set_ticks(range(size), what.names, rotation=90 if long else 0)
    else:
        axis.set_major_locator(MaxNLocator(min(size, 10), integer=True))


def _write_values(axes: Any, values: np.ndarray, low: float, high: float) -> None:
    middle = (low + high) / 2
    for row, column in np.ndindex(values.shape):
        value = values[row, column]
        if np.isfinite(value) and abs(value) >= 0.005:  # 0.00 is the colour alone
            colour = "#010101" if value > middle else "white"  # pages in dark colours replace black
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)
