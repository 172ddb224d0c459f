"""Matrices as heat maps, and partitions as examples per client above and class counts per client below."""

import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pflsim.types import Axis, Matrix, Split

SIDE = 2.6
"""Length of a map's shorter side in inches."""
MAX_COLUMNS = 4
"""Maximum number of maps beside each other."""
MAX_ANNOTATED = 144
"""Larger matrices are drawn without numbers in their cells."""
MAX_TICKS = 40
"""Longer axes show a few numbers instead of all names."""
LONGEST = 24
"""Characters of a client's name in a figure; the rest is cut off."""
COLOURS: Mapping[Split, str] = {"train": "#2f6db8", "val": "#7da9de", "test": "#c3cbd6"}
MUTED = "#5b626e"


@contextmanager
def drawing() -> Iterator[None]:
    """Give matplotlib its defaults, whatever a matplotlibrc or the calling program sets, and silence missing glyphs."""
    from matplotlib import style

    with style.context("default"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        yield


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


def partition_figure(
    counts: Mapping[Split, np.ndarray], title: str = "", groups: Sequence[int] = (), names: Sequence[str] = ()
) -> Any:
    """Draw a stacked bar of train/val/test examples per client, below it its group, and below that a tile per class.

    The shade of a tile is the client's number of training and validation examples of the class on a logarithmic scale;
    none has no shade. Small pictures show the numbers.

    Args:
        counts: [N, C] int by split, from `pflsim.data.federated.class_counts`.
        title: the figure's title.
        groups: the group of each client in a shift, shown as a row of colours; () if there is none.
        names: of the clients; () if they have none. The figure has room for 60.

    Returns:
        A matplotlib `Figure`.
    """
    from matplotlib.figure import Figure

    clients, classes = counts["train"].shape
    width, height = min(max(6.0, 2.2 + 0.45 * clients), 14.0), 3.0 + min(max(1.5, 0.25 * classes), 7.0)
    names = [name[:LONGEST] for name in names] if clients <= 60 else []
    bottom = 0.5 + 0.07 * max(map(len, names), default=0)
    height += bottom - 0.5
    figure = Figure(figsize=(width, height))
    margins = {"left": 0.75 / width, "right": 1 - 0.65 / width, "bottom": bottom / height, "top": 1 - 0.45 / height}
    heights = (1, *([0.1] if groups else []), 1.2 + classes / 14)
    widths, gaps = (60, 1), {"hspace": 0.08, "wspace": 0.04}
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights, width_ratios=widths, **gaps, **margins)
    tiles = figure.add_subplot(grid[-1, 0])
    bars = figure.add_subplot(grid[0, 0], sharex=tiles)
    _draw_bars(bars, counts)
    if groups:
        _draw_groups(figure.add_subplot(grid[1, 0], sharex=tiles), groups)
    _draw_tiles(figure, tiles, figure.add_subplot(grid[-1, 1]), counts["train"] + counts["val"])
    if names:
        tiles.set_xticks(range(clients), names, rotation=90, fontsize=7)
    for axes in figure.axes:
        axes.tick_params(labelsize=8, labelcolor=MUTED, color=MUTED)
        axes.spines[:].set_color(MUTED)
    bars.set_title(textwrap.fill(title, round(14 * width)), fontsize=8, loc="left", color=MUTED)
    return figure


def _draw_bars(axes: Any, counts: Mapping[Split, np.ndarray]) -> None:
    clients = len(counts["train"])
    base = np.zeros(clients)
    for name, colour in COLOURS.items():
        height = counts[name].sum(axis=1)
        if height.any() and clients <= 60:
            axes.bar(np.arange(clients), height, 0.85, bottom=base, color=colour, label=name, linewidth=0)
        elif height.any():  # one shape for all clients
            lower, upper = (np.append(each, each[-1]) for each in (base, base + height))
            style = {"step": "post", "color": colour, "label": name, "linewidth": 0}
            axes.fill_between(np.arange(clients + 1) - 0.5, lower, upper, **style)
        base += height
    axes.set_ylabel("examples")
    axes.set_ylim(0, base.max() * 1.22)
    axes.tick_params(labelbottom=False)
    axes.legend(ncols=3, loc="upper right", fontsize=8, frameon=False, borderaxespad=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_groups(axes: Any, groups: Sequence[int]) -> None:
    axes.imshow([groups], aspect="auto", cmap="Set3", interpolation="none")
    axes.set_yticks([0], ["group"])
    axes.tick_params(labelbottom=False, bottom=False, left=False)
    for client, group in enumerate(groups if len(groups) <= 60 else ()):
        axes.text(client, 0, str(group), ha="center", va="center", fontsize=7, color="black")


def _draw_tiles(figure: Any, axes: Any, bar_axes: Any, held: np.ndarray) -> None:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.ticker import MaxNLocator

    clients, classes = held.shape
    top = max(int(held.max()), 2)
    shown = np.ma.masked_equal(held.T, 0)
    norm = LogNorm(0.5, top)
    blues = LinearSegmentedColormap.from_list("blues", ["#2f6db833", "#2f6db8"])  # more opaque: also for dark pages
    image = axes.imshow(shown, aspect="auto", cmap=blues, norm=norm, interpolation="none")
    axes.set_xlabel("client")
    axes.set_ylabel("class (train + val)")
    for axis, size in ((axes.xaxis, clients), (axes.yaxis, classes)):
        axis.set_major_locator(MaxNLocator(min(size, 20), integer=True))
    axes.set_xlim(-0.5, clients - 0.5)
    axes.spines[:].set_visible(False)
    if clients <= 60:
        axes.vlines(np.arange(1, clients) - 0.5, -0.5, classes - 0.5, color="#d8dee4", linewidth=0.6)
    if classes <= 30:
        axes.hlines(np.arange(1, classes) - 0.5, -0.5, clients - 0.5, color="#d8dee4", linewidth=0.6)
    if clients <= 24 and classes <= 20:
        for client, c in np.argwhere(held > 0):
            colour = "white" if held[client, c] > top**0.6 else "black"
            axes.text(client, c, str(held[client, c]), ha="center", va="center", fontsize=7, color=colour)
        bar_axes.set_axis_off()
    else:
        figure.colorbar(image, cax=bar_axes, format="%d").minorticks_off()
