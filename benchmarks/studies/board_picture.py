"""Draws differences to Local on several leaderboards: `python -m benchmarks.studies.board_picture`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.studies.boards import BENCHMARKS
from benchmarks.studies.leaderboard import Place, standing
from pflsim.analysis.differences import Difference
from pflsim.analysis.drawings import CONTEXT, GREY, GRID, Style, mark_of, new_figure, signed_tick, template
from pflsim.display.identity import identity
from pflsim.display.metrics import signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = Style(10, 10, 11, 10, "DejaVu Sans")
TITLES = {
    "fashion-mnist-two-classes": ("two classes", "Fashion-MNIST"),
    "fashion-mnist-dirichlet": ("Dirichlet 0.1", "Fashion-MNIST"),
    "mnist-permuted-labels": ("permuted labels", "MNIST"),
    "mnist-rotation": ("rotations", "MNIST"),
}
MUTED, SOFT = "#5b626e", "#f5f6f8"


def main() -> None:
    """Draw a panel for each benchmark, the method with the best mean over them first, and Local as a line at 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.board_picture")
    parser.add_argument("benchmarks", nargs="+", choices=BENCHMARKS)
    parser.add_argument("--methods", metavar="NAMES", help="with commas between; default: those of all benchmarks")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    draw(given.benchmarks, given.methods.split(",") if given.methods else None).savefig(given.out, dpi=130)
    print(f"written: {given.out}")


def draw(benchmarks: Sequence[str], methods: Sequence[str] | None = None) -> Figure:
    """Return the figure of some benchmarks, with these methods, or those of all of them, and Local."""
    place = Place("data", Path())
    found = {
        name: {d.group.label: d for d in standing(place, name)[1].differences if d.mean is not None}
        for name in benchmarks
    }
    shown = set.intersection(*([{*methods}] if methods else []), *({*own} for own in found.values()))
    means = {method: fmean(own[method].mean or 0.0 for own in found.values()) for method in shown} | {"local": 0.0}
    order = sorted(means, key=lambda method: -means[method])
    with template(STYLE):
        figure = new_figure(STYLE, STYLE.page, 1.1 + 0.29 * len(order))
        panels = figure.subplots(1, len(found), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (name, own) in zip(panels, found.items(), strict=True):
            setting, data = TITLES.get(name, (name, ""))
            axes.set_title(setting, loc="left", weight="bold", pad=36)
            axes.annotate(data, (0, 1), (0, 23), "axes fraction", textcoords="offset points", color=MUTED)
            _panel(axes, order, own)
        panels[0].xaxis.set_major_formatter(signed_tick)  # the panels share it
        panels[0].set_yticks(range(len(order)), [identity(method).display for method in order])
        panels[0].set_ylim(len(order) - 0.5, -0.5)
        what = "difference to Local, which trains alone, in percentage points, with its 95% interval over seeds"
        figure.supxlabel(what, fontsize=10, color=MUTED)
    return figure


def _panel(axes: Any, order: Sequence[str], differences: Mapping[str, Difference]) -> None:
    """Draw a row for each method; Local has no difference."""
    axes.axvline(0, color=CONTEXT, linewidth=1, zorder=1)
    axes.grid(axis="x", color=GRID)
    axes.xaxis.tick_top()
    axes.tick_params(axis="both", length=0, pad=2)
    axes.spines[:].set_visible(False)
    for y, method in enumerate(order):
        d, who = differences.get(method), identity(method)
        if who.family == "reference":
            axes.axhspan(y - 0.5, y + 0.5, color=SOFT, zorder=0)
        if d is None:
            axes.plot(0, y, **mark_of(who, "clear", 6.5))
            continue
        (low, high), mean = d.over_seeds, 100 * (d.mean or 0.0)
        if low is not None and high is not None:
            colour = GREY if d.level == "not clear" else who.light
            axes.plot([100 * low, 100 * high], [y, y], color=colour, linewidth=2, alpha=0.6)
        axes.plot(mean, y, **mark_of(who, d.level, 6.5))
        text = {"color": "black" if d.level == "clear" else MUTED, "va": "center"}
        axes.text(1.02, y, signed(mean, 1), transform=axes.get_yaxis_transform(), **text)


if __name__ == "__main__":
    main()
