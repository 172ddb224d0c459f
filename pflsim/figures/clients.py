"""How every client fares: bars in the order of their rates, and a reference beside each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pflsim.figures.svg import GRID, INK, style_axes


def draw_clients(
    rates: Mapping[int, float],
    reference: Mapping[int, float] | None = None,
    *,
    colour: str,
    title: str = "",
    reference_name: str = "local",
    size: tuple[float, float] = (4.9, 2.9),
) -> Any:
    """Draw a bar for every client, the lowest rate first: a matplotlib `Figure`.

    Args:
        rates: accuracy by client.
        reference: the same clients' accuracy under what they are held against, drawn as a dash at each bar.
        colour: of the bars.
        title: above all.
        reference_name: what the reference is called in the legend.
        size: inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    order = sorted(rates, key=lambda client: (rates[client], client))
    heights = np.array([rates[client] for client in order])
    _bars(axes, heights, colour)
    tenth = -(-len(order) // 10)
    axes.axvline(tenth + 0.5, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
    if reference:
        _dashes(axes, [reference.get(client, np.nan) for client in order], reference_name)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, borderaxespad=0, labelcolor=INK)
    axes.set_xlim(0.5, len(order) + 0.5)
    axes.set_ylim(0, 1.04)
    axes.set_xlabel("clients, the lowest accuracy first")
    axes.set_ylabel("test accuracy")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.set_title(title, loc="left", fontsize="medium")
    style_axes(axes)
    axes.grid(False, axis="x")
    axes.grid(color=GRID, axis="y")
    return figure


def _bars(axes: Any, heights: np.ndarray, colour: str) -> None:
    """One shape for all bars, so that a thousand clients are no heavier than ten; gaps while they can be seen."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    half = 0.4 if len(heights) <= 60 else 0.5
    places = np.arange(1, len(heights) + 1)
    corners = np.stack(
        [
            np.stack([places + side * half, edge], axis=1)
            for side, edge in ((-1, heights * 0), (-1, heights), (1, heights), (1, heights * 0))
        ],
        axis=1,
    )  # [N, 4, 2]
    codes = np.tile([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO], len(heights))
    axes.add_patch(PathPatch(Path(corners.reshape(-1, 2), codes), facecolor=colour, linewidth=0, alpha=0.75))


def _dashes(axes: Any, heights: list[float], name: str) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    kept = [(place, height) for place, height in enumerate(heights, start=1) if np.isfinite(height)]
    corners = [(place + side * 0.45, height) for place, height in kept for side in (-1, 1)]
    if corners:
        codes = np.tile([Path.MOVETO, Path.LINETO], len(kept))
        axes.add_patch(PathPatch(Path(corners, codes), facecolor="none", edgecolor=INK, linewidth=1.8))
    axes.plot([], [], color=INK, linewidth=1.8, label=f"{name}, same client")
