"""Worst clients against bytes: a point for every group."""

from __future__ import annotations

from collections.abc import Sequence

from pflsim.analysis.report.curves import SIZE, Chart, unit_of
from pflsim.analysis.report.rows import Row
from pflsim.figures.svg import colour_of, drawing, style_axes, to_svg


def price_chart(rows: Sequence[Row]) -> Chart:
    """The worst decile of every group against the bytes it took, both of the headline's round."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        sent = [row.bytes for row in rows]
        scale, unit = unit_of(max(sent))
        for number, (row, count) in enumerate(zip(rows, sent, strict=True)):
            value = row.stats["worst_decile"]
            axes.errorbar(
                *(count / scale, value.mean, value.spread),
                **{"color": colour_of(number), "marker": "o", "capsize": 3, "linestyle": ""},
            )
        axes.set_xlabel(f"{unit} up to that round, both ways, all clients")
        axes.set_ylabel("accuracy, worst tenth")
        axes.margins(0.08, 0.15)
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -0.03), min(high, 1.03))
        end = max(sent) / scale or 1.0
        axes.set_xlim(-0.04 * end, 1.05 * end)
        style_axes(axes)
        caption = "The worst tenth of the clients against the price: upper left is better."
        if any(row.stats["worst_decile"].spread is not None for row in rows):
            caption += " Whiskers: standard deviation over seeds."
        return Chart(to_svg(figure, "price", caption), caption)
