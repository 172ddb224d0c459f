"""Draws differences to Local on several leaderboards: python -m benchmarks.board_picture BENCHMARK... --out FILE."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from benchmarks.boards import BENCHMARKS
from benchmarks.leaderboard import Place, standing
from pflsim.analysis.drawings import CONTEXT, GREY, GRID, mark_of, signed_tick
from pflsim.analysis.paper_style import Style, new_figure, template
from pflsim.analysis.verdict import signed
from pflsim.terminal.identity import identity

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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.board_picture")
    parser.add_argument("benchmarks", nargs="+", choices=BENCHMARKS)
    parser.add_argument("--methods", metavar="NAMES", help="with commas between; default: those of all benchmarks")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    place = Place("data", Path())
    found = {
        name: {d.group.label: d for d in standing(place, name)[1].differences if d.mean is not None}
        for name in given.benchmarks
    }
    chosen = [set(given.methods.split(","))] if given.methods else []
    methods = set.intersection(*chosen, *(set(own) for own in found.values()))
    means = {method: fmean(own[method].mean or 0.0 for own in found.values()) for method in methods} | {"local": 0.0}
    order = sorted(means, key=lambda method: -means[method])
    with template(STYLE):
        figure = new_figure(STYLE, STYLE.page, 1.1 + 0.29 * len(order))
        panels = figure.subplots(1, len(found), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (name, own) in zip(panels, found.items(), strict=True):
            setting, data = TITLES.get(name, (name, ""))
            axes.set_title(setting, loc="left", weight="bold", pad=36)
            axes.annotate(data, (0, 1), (0, 23), "axes fraction", textcoords="offset points", color=MUTED)
            axes.axvline(0, color=CONTEXT, linewidth=1, zorder=1)
            axes.grid(axis="x", color=GRID)
            axes.xaxis.tick_top()
            axes.tick_params(axis="both", length=0, pad=2)
            axes.spines[:].set_visible(False)
            for y, method in enumerate(order):
                d, who = own.get(method), identity(method)
                if method in ("local", "fedavg"):
                    axes.axhspan(y - 0.5, y + 0.5, color=SOFT, zorder=0)
                if d is None:
                    axes.plot(0, y, **mark_of(who, "clear", 6.5))
                    continue
                low, high = d.over_seeds
                colour = GREY if d.level == "not clear" else who.light
                if low is not None and high is not None:
                    axes.plot([100 * low, 100 * high], [y, y], color=colour, linewidth=2, alpha=0.6)
                axes.plot(100 * (d.mean or 0.0), y, **mark_of(who, d.level, 6.5))
                text = {"x": 1.02, "y": y, "s": signed(100 * (d.mean or 0.0), 1), "ha": "left", "va": "center"}
                axes.text(**text, color="black" if d.level == "clear" else MUTED, transform=axes.get_yaxis_transform())
        panels[0].xaxis.set_major_formatter(signed_tick)  # the panels share it
        panels[0].set_yticks(range(len(order)), [identity(method).display for method in order])
        panels[0].set_ylim(len(order) - 0.5, -0.5)
        figure.supxlabel(
            "difference to Local, which trains alone, in percentage points, with its 95% interval over seeds",
            fontsize=10,
            color=MUTED,
        )
        figure.savefig(given.out, dpi=130)
    print(f"written: {given.out}")


if __name__ == "__main__":
    main()
