"""The curves of a report: accuracy against rounds, bytes, and seconds, and the loss terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pflsim.analysis.compare.comparison import Comparison
from pflsim.analysis.compare.curves import AGAINST, accuracy, curve, curves_of
from pflsim.analysis.results import Group
from pflsim.figures.curves import Curve, draw_curves
from pflsim.figures.svg import drawing, style_axes, to_svg

SIZE = (4.9, 3.1)
"""Width and height of a chart in inches."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as SVG and its caption."""

    svg: str
    caption: str


def accuracy_charts(comparison: Comparison) -> list[Chart]:
    """Return charts of mean and worst-decile accuracy against rounds, bytes, and seconds."""
    charts = []
    for figure, label, words in (
        ("mean", "mean", "mean over clients"),
        ("worst_decile", "worst decile", "worst decile of the clients"),
    ):
        for against in AGAINST:
            curves, x_label = curves_of(comparison.groups, against, accuracy(figure))
            caption = f"Test accuracy, {words}, against {against}."
            if against == "bytes":
                end = max(x for each in curves for x in each.x)
                if end == 0:  # no method sends anything
                    continue
                silent = [bool(each.x) and max(each.x) == 0 for each in curves]
                levels = [[row.stats[figure].mean] * 2 for row in comparison.rows]
                curves = [
                    Curve(each.label, [0.0, end], level) if is_silent else each
                    for each, level, is_silent in zip(curves, levels, silent, strict=True)
                ]
                caption += " A horizontal line is a method without traffic, at its headline accuracy." * any(silent)
            drawn = _draw(curves, x_label, f"accuracy, {label}")
            charts.append(Chart(to_svg(drawn, f"{figure}-{against}", caption), caption))
    return charts


def loss_charts(groups: Sequence[Group]) -> list[Chart]:
    """Return a chart of every loss term against rounds."""
    terms = list(dict.fromkeys(t for g in groups for run in g.runs for line in run.history for t in line.losses))
    charts = []
    for number, term in enumerate(terms):
        curves = [curve(group, "rounds", lambda _, line, term=term: line.losses.get(term)) for group in groups]
        caption = f"Loss term {term} against rounds."
        drawn = _draw(curves, "round", term)
        values = np.array([y for each in curves for y in each.y])
        if len(values) and (values > 0).all() and values.max() > 100 * values.min():
            drawn.axes[0].set_yscale("log")
        charts.append(Chart(to_svg(drawn, f"loss-{number}", caption), caption))
    return charts


def _draw(curves: Sequence[Curve], x_label: str, y_label: str) -> Any:
    """Draw without a legend: the page has one legend for all charts."""
    with drawing():
        figure = draw_curves(curves, x_label, y_label, size=SIZE, legend=False)
    style_axes(figure.axes[0])
    return figure
