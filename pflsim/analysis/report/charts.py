"""The charts and pictures of a report: accuracy, losses and clients as SVG, partitions and matrices as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pflsim.analysis.compare.comparison import Comparison
from pflsim.analysis.compare.curves import AGAINST, accuracy, curves_of
from pflsim.analysis.results import Group, Run
from pflsim.figures.curves import Curve, draw_curves
from pflsim.figures.heatmaps import by_kind, draw_heatmaps
from pflsim.figures.svg import GRID, INK, colour_of, drawing, png_uri, style_axes, to_png, to_svg
from pflsim.run_folder.diagnostics import read_diagnostics
from pflsim.run_folder.summary import Choice
from pflsim.terminal.formats import plural

SIZE = (4.9, 3.1)
"""Width and height of a chart in inches."""
MAX_WITH_GAPS = 60
"""With more clients, bars are drawn without gaps."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as SVG and its caption."""

    svg: str
    caption: str


def accuracy_charts(comparison: Comparison) -> list[Chart]:
    """Return charts of mean and worst-decile accuracy against rounds, bytes, and seconds."""
    charts = []
    for figure, words in (("mean", "mean over clients"), ("worst_decile", "worst decile of the clients")):
        for against in AGAINST:
            curves, x_label = curves_of(comparison.groups, against, accuracy(figure))
            caption = f"Test accuracy, {words}, against {against}."
            if against == "bytes":
                end = max(x for each in curves for x in each.x)
                if end == 0:  # no method sends anything
                    continue
                silent = [number for number, each in enumerate(curves) if each.x and max(each.x) == 0]
                for number in silent:
                    level = comparison.rows[number].stats[figure].mean
                    curves[number] = Curve(curves[number].label, [0.0, end], [level, level])
                caption += " A horizontal line is a method without traffic, at its headline accuracy." * bool(silent)
            y_label = f"accuracy, {figure.replace('_', ' ')}"
            charts.append(_chart(curves, x_label, y_label, f"{figure}-{against}", caption))
    return charts


def loss_charts(groups: Sequence[Group]) -> list[Chart]:
    """Return a chart of every loss term against rounds."""
    terms = list(dict.fromkeys(t for g in groups for run in g.runs for line in run.history for t in line.losses))
    charts = []
    for number, term in enumerate(terms):
        curves, x_label = curves_of(groups, "rounds", lambda _, line, term=term: line.losses.get(term))
        values = [y for each in curves for y in each.y]
        log = bool(values) and min(values) > 0 and max(values) > 100 * min(values)
        charts.append(_chart(curves, x_label, term, f"loss-{number}", f"Loss term {term} against rounds.", log))
    return charts


def _chart(curves: Sequence[Curve], x_label: str, y_label: str, name: str, caption: str, log: bool = False) -> Chart:
    """Draw without a legend: the page has one legend for all charts."""
    with drawing():
        figure = draw_curves(curves, x_label, y_label, size=SIZE, legend=False)
    style_axes(figure.axes[0])
    if log:
        figure.axes[0].set_yscale("log")
    return Chart(to_svg(figure, name, caption), caption)


def shown_runs(groups: Sequence[Group]) -> list[Run]:
    """Return one run of every group: that of the smallest common seed, else of the group's smallest seed."""
    common = set.intersection(*({run.seed for run in group.runs} for group in groups))
    seed = min(common) if common else None
    return [next((run for run in group.runs if run.seed == seed), group.runs[0]) for group in groups]


def client_charts(groups: Sequence[Group], choice: Choice) -> list[Chart]:
    """Return a chart of sorted bars for each group, with Local's accuracy on the same client if Local is a group."""
    runs = shown_runs(groups)
    local = next((pair for pair in zip(groups, runs, strict=True) if pair[0].method == "local"), None)
    charts = []
    for number, (group, run) in enumerate(zip(groups, runs, strict=True)):
        rates, line = _rates(run, choice), run.at(choice)
        if not rates or line is None:
            continue
        caption = f"{group.label}, seed {run.seed}, round {line.round}: "
        reference, name = None, ""
        if local and local[1] is not run and local[1].partition_hash == run.partition_hash:
            reference, name = _rates(local[1], choice), local[0].label
        caption += _counts(rates, reference, name) if reference else "every client's test accuracy"
        with drawing():
            drawn = draw_clients(rates, reference, colour_of(number), group.label, name)
            charts.append(Chart(to_svg(drawn, f"clients-{number}", caption), f"{caption}."))
    return charts


def _rates(run: Run, choice: Choice) -> dict[int, float]:
    line = run.at(choice)
    return {} if line is None else {client: found.rate for client, found in run.counts(line.round).items()}


def _counts(rates: dict[int, float], reference: dict[int, float], name: str) -> str:
    both = rates.keys() & reference.keys()
    better = sum(rates[client] > reference[client] for client in both)
    worse = sum(rates[client] < reference[client] for client in both)
    equal = len(both) - better - worse
    return f"{better} of {plural(len(both), 'client')} are better than with {name}, {worse} worse, {equal} equal"


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as a data URI with its alternative text and caption; wide pictures take the width of the page."""

    uri: str
    alt: str
    caption: str
    wide: bool = False


def partition_pictures(groups: Sequence[Group]) -> list[Picture]:
    """Return partition.png of every different partition among the shown runs."""
    seen: dict[str, Run] = {}
    for run in shown_runs(groups):
        if (run.folder / "partition.png").is_file():
            seen.setdefault(run.partition_hash, run)
    return [
        Picture(
            png_uri((run.folder / "partition.png").read_bytes()),
            f"Examples of {run.partition['clients']} clients by split and by {run.partition['classes']} classes",
            f"Seed {run.seed}: {run.partition['data']}, {run.partition['partition']}; partition {digest[:8]}.",
            wide=True,
        )
        for digest, run in seen.items()
    ]


def matrix_pictures(groups: Sequence[Group]) -> list[Picture]:
    """Return the matrices of every group's shown run, one picture for each kind; wide pictures come first."""
    pictures = []
    for group, run in zip(groups, shown_runs(groups), strict=True):
        diagnostics = read_diagnostics(run.folder)
        if diagnostics is None:
            continue
        for matrices in by_kind(diagnostics.matrices).values():
            first = matrices[0]
            what = f"{group.label}, seed {run.seed}, round {diagnostics.round}: {first.title}"
            alt = f"Heat map, {first.rows.label} by {first.columns.label}. {what}"
            pictures.append(Picture(to_png(draw_heatmaps(matrices), dpi=100), alt, f"{what}.", len(matrices) > 1))
    return sorted(pictures, key=lambda picture: not picture.wide)


def draw_clients(
    rates: Mapping[int, float], reference: Mapping[int, float] | None, colour: str, title: str, reference_name: str
) -> Any:
    """Draw a bar for every client, sorted by accuracy, into a matplotlib `Figure`.

    Args:
        rates: accuracy by client.
        reference: the accuracy of another method by client, drawn as a dash at each bar.
        colour: the bars' colour.
        title: title of the figure.
        reference_name: the reference's name in the legend.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(SIZE[0], 2.9), layout="constrained")
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
