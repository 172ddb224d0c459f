"""The charts of a report as SVG: accuracy, losses, clients, partitions and matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pandas as pd
from matplotlib import rc_context

from pflsim.analysis.comparison import Comparison
from pflsim.analysis.curves import AGAINST, Curve, curves_of, draw_curves, of_test
from pflsim.analysis.groups import Group
from pflsim.analysis.report.svg import INK, PALETTE, STYLE, to_svg
from pflsim.analysis.runs import Run
from pflsim.data.record import LONGEST, partition_figure
from pflsim.records.heatmaps import by_kind, draw_heatmaps
from pflsim.records.history import RoundMetrics
from pflsim.records.summary import Choice
from pflsim.records.trace import read_matrices
from pflsim.terminal.formats import plural
from pflsim.types import Split

SIZE = (4.9, 3.1)
"""Width and height of a chart in inches."""
MAX_WITH_GAPS = 60
"""With more clients, bars are drawn without gaps."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as SVG and its caption; wide charts take the width of the page."""

    svg: str
    caption: str
    wide: bool = False


def accuracy_charts(comparison: Comparison) -> Iterator[Chart]:
    """Yield charts of mean and worst decile of the primary metric against rounds, bytes, and seconds."""
    for figure, words in (("mean", "mean over clients"), ("worst_decile", "worst decile of the clients")):
        for against in AGAINST:
            curves, x_label = curves_of(comparison.groups, against, of_test(figure))
            caption = f"Test {comparison.primary}, {words}, against {against}."
            if against == "bytes":
                end = max(x for each in curves for x in each.x)
                if end == 0:  # no method sends anything
                    continue
                silent = [number for number, each in enumerate(curves) if each.x and max(each.x) == 0]
                for number in silent:
                    level = comparison.rows[number].figures[figure].mean
                    curves[number] = Curve(curves[number].label, [0.0, end], [level, level])
                caption += " A horizontal line is a method without traffic, at its headline result." * bool(silent)
            y_label = f"{comparison.primary}, {figure.replace('_', ' ')}"
            yield _chart(curves, x_label, y_label, f"{figure}-{against}", caption)


def metric_charts(comparison: Comparison) -> Iterator[Chart]:
    """Yield a chart of every metric besides the primary one against rounds."""
    for name in comparison.metrics:

        def measure(run: Run, line: RoundMetrics, name: str = name) -> float | None:
            found = line.evaluations.get(run.reported)
            return found and name in found.metrics and found.metrics[name].mean or None

        curves, x_label = curves_of(comparison.groups, "rounds", measure)
        yield _chart(curves, x_label, name.replace("_", " "), name, f"{name}, mean over clients.")


def loss_charts(groups: Sequence[Group]) -> Iterator[Chart]:
    """Yield a chart of every loss term against rounds."""
    terms = list(dict.fromkeys(t for g in groups for run in g.runs for line in run.history for t in line.losses))
    for number, term in enumerate(terms):
        curves, x_label = curves_of(groups, "rounds", lambda _, line, term=term: line.losses.get(term))
        values = [y for each in curves for y in each.y]
        log = bool(values) and min(values) > 0 and max(values) > 100 * min(values)
        yield _chart(curves, x_label, term, f"loss-{number}", f"Loss term {term} against rounds.", log)


def _chart(curves: Sequence[Curve], x_label: str, y_label: str, name: str, caption: str, log: bool = False) -> Chart:
    """Draw without a legend: the page has one legend for all charts."""
    with rc_context(STYLE):
        figure = draw_curves(curves, x_label, y_label, SIZE)
    if log:
        figure.axes[0].set_yscale("log")
    return Chart(to_svg(figure, name, caption), caption)


def shown_runs(groups: Sequence[Group]) -> list[Run]:
    """Return one run of every group: that of the smallest common seed, else of the group's smallest seed."""
    common = set.intersection(*({run.seed for run in group.runs} for group in groups))
    seed = min(common) if common else None
    return [next((run for run in group.runs if run.seed == seed), group.runs[0]) for group in groups]


def client_charts(groups: Sequence[Group], choice: Choice) -> Iterator[Chart]:
    """Yield a chart of sorted bars for each group, with Local's value on the same client if Local is a group."""
    runs = shown_runs(groups)
    local = next((pair for pair in zip(groups, runs, strict=True) if pair[0].method == "local"), None)
    for number, (group, run) in enumerate(zip(groups, runs, strict=True)):
        rates, line = _rates(run, choice), run.at(choice)
        if not rates or line is None:
            continue
        caption = f"{group.label}, seed {run.seed}, round {line.round}: "
        reference, name = None, ""
        if local and local[1] is not run and local[1].partition_hash == run.partition_hash:
            reference, name = _rates(local[1], choice), local[0].label
        caption += _counts(rates, reference, name, run.higher) if reference else f"every client's test {run.primary}"
        with rc_context(STYLE):
            figure = _draw_clients(run, rates, reference, PALETTE[number % len(PALETTE)])
            svg = to_svg(figure, f"clients-{number}", caption)
        yield Chart(svg, f"{caption}.")


def client_values(groups: Sequence[Group], choice: Choice) -> pd.DataFrame | None:
    """Return the value of each named client (row) in each group (column); None: no names, or several partitions."""
    runs = shown_runs(groups)
    names = runs[0].partition.get("names", ())
    if not names or len({run.partition_hash for run in runs}) > 1:
        return None
    lines = [(group.label, run, run.at(choice)) for group, run in zip(groups, runs, strict=True)]
    values = pd.DataFrame({label: run.counts(line.round)[run.primary] for label, run, line in lines if line})
    return values.rename(dict(enumerate(names))).sort_index()


def _rates(run: Run, choice: Choice) -> dict[int, float]:
    line = run.at(choice)
    return {} if line is None else run.counts(line.round)[run.primary].dropna().to_dict()


def _counts(rates: dict[int, float], reference: dict[int, float], name: str, higher: bool) -> str:
    both, sign = rates.keys() & reference.keys(), 1 if higher else -1
    better = sum(sign * rates[client] > sign * reference[client] for client in both)
    worse = sum(sign * rates[client] < sign * reference[client] for client in both)
    equal = len(both) - better - worse
    counts = f"{better} of {plural(len(both), 'client')} are better than with {name}, {worse} worse, {equal} equal"
    return f"{counts}; dashes: {name} on the same client"


def partition_charts(groups: Sequence[Group]) -> Iterator[Chart]:
    """Yield the picture of every different partition among the shown runs."""
    seen = {run.partition_hash: run for run in shown_runs(groups) if "class_counts" in run.partition}
    for number, (digest, run) in enumerate(seen.items()):
        about = run.partition
        counts = {split: np.array([row[split] for row in about["class_counts"]]) for split in get_args(Split)}
        label = f"Examples of {about['clients']} clients by split and by {about['classes']} classes"
        shift = about.get("shift", {"name": "", "groups": ()})
        figure = partition_figure(counts, groups=shift["groups"], names=about.get("names", ()))
        svg = to_svg(figure, f"partition-{number}", label, bbox_inches="tight")
        names = ", ".join(filter(None, (about["data"], about["partition"], shift["name"])))
        yield Chart(svg, f"Seed {run.seed}: {names}; partition {digest[:8]}.", wide=True)


def matrix_charts(groups: Sequence[Group]) -> list[Chart]:
    """Return the matrices of every group's shown run, one chart for each kind; wide ones come first."""
    charts = []
    for group, run in zip(groups, shown_runs(groups), strict=True):
        diagnostics = read_matrices(run.folder)
        if diagnostics is None:
            continue
        for kind in by_kind(diagnostics.matrices).values():
            first = kind[0]
            what = f"{group.label}, seed {run.seed}, round {diagnostics.round}: {first.title}"
            label = f"Heat map, {first.rows.label} by {first.columns.label}. {what}"
            charts.append(Chart(to_svg(draw_heatmaps(kind), f"matrix-{len(charts)}", label), f"{what}.", len(kind) > 1))
    return sorted(charts, key=lambda chart: not chart.wide)


def _draw_clients(run: Run, rates: Mapping[int, float], reference: Mapping[int, float] | None, colour: str) -> Any:
    """Draw a bar for every client, the worst first, into a matplotlib `Figure`.

    Args:
        run: has the metric and the names of the clients, for which the chart has room up to `MAX_WITH_GAPS`.
        rates: the metric by client.
        reference: the metric of another method by client, drawn as a dash at each bar.
        colour: the bars' colour.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(SIZE[0], 2.9), layout="constrained")
    axes = figure.add_subplot()
    order = sorted(rates, key=lambda client: (rates[client] if run.higher else -rates[client], client))
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
        axes.plot(x, y, color=INK, linewidth=1.8)
    axes.set_xlim(0.5, len(order) + 0.5)
    if min(rates.values()) >= 0 and max(rates.values()) <= 1:
        axes.set_ylim(0, 1.04)
    axes.set_xlabel(f"clients by {run.primary}")
    axes.set_ylabel(f"test {run.primary}")
    if (names := run.partition.get("names")) and len(order) <= MAX_WITH_GAPS:
        axes.set_xticks(places, [names[client][:LONGEST] for client in order], rotation=90, fontsize=7)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.grid(False, axis="x")
    return figure
