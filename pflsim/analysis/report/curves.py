"""The curves of a page: accuracy against rounds, bytes and seconds, and the loss terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from pflsim.analysis.report.rows import Row
from pflsim.analysis.results import Run
from pflsim.analysis.results.groups import Group
from pflsim.figures.curves import Curve, draw_curves
from pflsim.figures.svg import drawing, to_svg
from pflsim.figures.svg import style_axes as style_axes
from pflsim.run_folder.history import RoundMetrics

POINTS = 400
"""A curve has no more points than this; others in between are left out."""
SIZE = (4.9, 3.1)
"""Inches of a chart."""
Along = Literal["rounds", "bytes", "seconds"]
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart and what is written under it."""

    svg: str
    caption: str


def accuracy_charts(rows: Sequence[Row]) -> list[Chart]:
    """Mean and worst decile of each group's judged model against rounds, bytes and seconds."""
    charts = []
    for figure, words in (("mean", "mean over clients"), ("worst_decile", "worst tenth of the clients")):
        for along in ("rounds", "bytes", "seconds"):
            if along == "bytes" and not any(row.bytes for row in rows):
                continue  # nobody sends anything
            curves, unit = _scaled([_accuracy(row.group, figure, along) for row in rows], along)
            against = {"rounds": "round", "bytes": f"{unit}, both ways", "seconds": "seconds"}[along]
            caption, silent = f"Test accuracy, {words}, against {along}.", []
            if along == "bytes":
                curves, silent = _levels(curves, rows, figure)
            if silent:
                caption += f" {' and '.join(silent)} sends nothing: a line at the level of its headline figure."
            drawn = _drawn(curves, against, f"accuracy, {'mean' if figure == 'mean' else 'worst tenth'}")
            charts.append(Chart(to_svg(drawn, f"{figure}-{along}", caption), caption))
    return charts


def loss_charts(groups: Sequence[Group]) -> list[Chart]:
    """Every loss term against rounds, with the groups that have it."""
    terms = list(dict.fromkeys(t for g in groups for run in g.runs for line in run.history for t in line.losses))
    charts = []
    for number, term in enumerate(terms):
        curves = [_over_seeds(group, "rounds", _loss(term)) for group in groups]
        caption = f"Loss term {term} against rounds."
        drawn = _drawn(curves, "round", term)
        _logarithmic(drawn.axes[0], [y for curve in curves for y in curve.y])
        charts.append(Chart(to_svg(drawn, f"loss-{number}", caption), caption))
    return charts


def _loss(term: str) -> Callable[[Run, RoundMetrics], float | None]:
    return lambda _, line: line.losses.get(term)


def _accuracy(group: Group, figure: str, along: Along) -> Curve:
    def value(run: Run, line: RoundMetrics) -> float | None:
        stats = line.accuracy.get(run.reported)
        return None if stats is None else getattr(stats, figure)

    return _over_seeds(group, along, value)


def _over_seeds(group: Group, along: Along, value: Callable[[Run, RoundMetrics], float | None]) -> Curve:
    """Mean over the seeds in the rounds that all of them have; the band goes from the lowest to the highest."""
    by_run = []
    for run in group.runs:
        places = _places(run, along)
        found = ((line.round, place, value(run, line)) for line, place in zip(run.history, places, strict=True))
        by_run.append({number: (place, y) for number, place, y in found if y is not None})
    rounds = sorted(set.intersection(*(set(found) for found in by_run)))
    if len(rounds) > POINTS:
        rounds = [rounds[n] for n in sorted(set(np.linspace(0, len(rounds) - 1, POINTS).round().astype(int)))]
    points = np.array([[found[number] for number in rounds] for found in by_run], dtype=float)  # [seeds, rounds, 2]
    if not rounds:
        return Curve(group.label, [], [])
    x, y = points[:, :, 0].mean(0), points[:, :, 1]
    edges = (y.min(0).tolist(), y.max(0).tolist()) if len(by_run) > 1 else (None, None)
    return Curve(group.label, x.tolist(), y.mean(0).tolist(), *edges)


def _places(run: Run, along: Along) -> list[float]:
    if along == "rounds":
        return [line.round for line in run.history]
    if along == "bytes":
        return [line.traffic_total.up_bytes + line.traffic_total.down_bytes for line in run.history]
    return list(accumulate(line.total_seconds for line in run.history))


def _scaled(curves: Sequence[Curve], along: Along) -> tuple[list[Curve], str]:
    """Bytes in a unit that suits the largest."""
    if along != "bytes":
        return list(curves), along
    scale, unit = unit_of(max((x for curve in curves for x in curve.x), default=0.0))
    return [replace(curve, x=[x / scale for x in curve.x]) for curve in curves], unit


def unit_of(largest: float) -> tuple[float, str]:
    """The unit for bytes up to the largest."""
    return next(((scale, unit) for scale, unit in UNITS if largest >= scale), UNITS[-1])


def _levels(curves: Sequence[Curve], rows: Sequence[Row], figure: str) -> tuple[list[Curve], list[str]]:
    """In the place of a curve without any bytes, a line at the group's headline figure."""
    end = max((x for curve in curves for x in curve.x), default=0.0)
    silent = [bool(curve.x) and max(curve.x) == 0.0 < end for curve in curves]
    levels = [
        Curve(curve.label, [0.0, end], [row.stats[figure].mean] * 2) if is_silent else curve
        for curve, row, is_silent in zip(curves, rows, silent, strict=True)
    ]
    return levels, [curve.label for curve, is_silent in zip(curves, silent, strict=True) if is_silent]


def _drawn(curves: Sequence[Curve], x_label: str, y_label: str) -> Any:
    """Without a legend, which the page has once for all charts."""
    from matplotlib.ticker import MaxNLocator

    with drawing():
        figure = draw_curves(curves, x_label, y_label, size=SIZE)
    for axes in figure.axes:
        style_axes(axes)
        if x_label == "round":
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        legend = axes.get_legend()
        if legend is not None:
            legend.remove()
    figure.legends.clear()
    figure.set_size_inches(*SIZE)
    return figure


def _logarithmic(axes: Any, values: Sequence[float]) -> None:
    """Where terms span more than two powers of ten."""
    positive = [y for y in values if np.isfinite(y) and y > 0]
    if len(positive) == len(values) and positive and max(positive) > 100 * min(positive):
        axes.set_yscale("log")
