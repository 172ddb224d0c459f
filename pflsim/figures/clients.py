"""Bar charts of every client's accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pflsim.figures.svg import GRID, INK, style_axes

MAX_WITH_GAPS = 60
"""With more clients, bars are drawn without gaps."""


def draw_clients(
    rates: Mapping[int, float],
    reference: Mapping[int, float] | None = None,
    *,
    colour: str,
    title: str = "",
    reference_name: str = "local",
    size: tuple[float, float] = (4.9, 2.9),
) -> Any:
    """Draw a bar for every client, sorted by accuracy, into a matplotlib `Figure`.

    Args:
        rates: accuracy by client.
        reference: the accuracy of another method by client, drawn as a dash at each bar.
        colour: the bars' colour.
        title: title of the figure.
        reference_name: the reference's name in the legend.
        size: width and height in inches.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    order = sorted(rates, key=lambda client: (rates[client], client))
    places, heights = np.arange(1, len(order) + 1), np.array([rates[client] for client in order])
    half = 0.4 if len(order) <= MAX_WITH_GAPS else 0.5
    # One step line for all bars, with zeros in the gaps: the SVG stays small with a thousand clients.
    edges = np.stack([places - half, places + half], axis=1).ravel()
    axes.stairs(np.stack([heights, 0 * heights], axis=1).ravel()[:-1], edges, fill=True, color=colour, alpha=0.75)
    axes.axvline(-(-len(order) // 10) + 0.5, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
    if reference:
        dashes = np.array([reference.get(client, np.nan) for client in order])
        x = np.stack([places - 0.45, places + 0.45, places], axis=1).ravel()
        y = np.stack([dashes, dashes, dashes * np.nan], axis=1).ravel()  # NaN separates the dashes
        axes.plot(x, y, color=INK, linewidth=1.8, label=f"{reference_name}, same client")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, borderaxespad=0, labelcolor=INK)
    axes.set_xlim(0.5, len(order) + 0.5)
    axes.set_ylim(0, 1.04)
    axes.set_xlabel("clients by accuracy")
    axes.set_ylabel("test accuracy")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.set_title(title, loc="left", fontsize="medium")
    style_axes(axes)
    axes.grid(False, axis="x")
    axes.grid(color=GRID, axis="y")
    return figure
