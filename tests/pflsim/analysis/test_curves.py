from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib.collections import PolyCollection

from pflsim.analysis.curves import Curve, draw_curves


def test_curves_and_bands(tmp_path: Path) -> None:
    with_band = Curve("a", [1, 2, 3], [0.1, math.nan, 0.3], [0.0, 0.1, 0.2], [0.2, 0.3, 0.4])
    figure = draw_curves([with_band, Curve("b", [2], [0.5])], "round", "accuracy", title="both", size=(5, 3))
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("round", "accuracy", "both")
    assert [line.get_color() for line in axes.lines] == ["C0", "C1"]
    assert [line.get_marker() for line in axes.lines] == ["None", "o"]
    (band,) = [found for found in axes.collections if isinstance(found, PolyCollection)]
    corners = {(float(x), float(y)) for x, y in band.get_paths()[0].vertices}  # type: ignore[union-attr]
    assert {(1, 0.0), (1, 0.2), (3, 0.2), (3, 0.4)} <= corners
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]  # type: ignore[union-attr]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert figure.get_size_inches() == pytest.approx((5, 3))
    figure.savefig(tmp_path / "x.png")


def test_many_curves_have_different_styles_and_a_legend_beside_them(tmp_path: Path) -> None:
    curves = [Curve(f"method {n}", [0, 1], [n, n + 1]) for n in range(30)]
    figure = draw_curves(curves, "x", "y", size=(5, 3))
    (axes,) = figure.axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 30
    figure.savefig(tmp_path / "x.png")
    (legend,) = figure.legends
    box, page = legend.get_window_extent(), figure.bbox
    assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
    assert axes.get_window_extent().x1 <= box.x0
