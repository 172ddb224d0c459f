import math
from pathlib import Path

import pytest
from matplotlib.collections import PolyCollection

from pflsim.analysis.curves import Curve, draw_curves


def test_curves_and_bands(tmp_path: Path) -> None:
    with_band = Curve("a", [1, 2, 3], [0.1, math.nan, 0.3], [0.0, 0.1, 0.2], [0.2, 0.3, 0.4])
    figure = draw_curves([with_band, Curve("b", [2], [0.5])], "round", "accuracy", (5, 3))
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "accuracy")
    assert [line.get_color() for line in axes.lines] == ["C0", "C1"]
    assert [line.get_marker() for line in axes.lines] == ["None", "o"]
    (band,) = [found for found in axes.collections if isinstance(found, PolyCollection)]
    corners = {(float(x), float(y)) for x, y in band.get_paths()[0].vertices}  # type: ignore[union-attr]
    assert {(1, 0.0), (1, 0.2), (3, 0.2), (3, 0.4)} <= corners
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert figure.get_size_inches() == pytest.approx((5, 3))
    figure.savefig(tmp_path / "x.png")


def test_many_curves_have_different_styles() -> None:
    figure = draw_curves([Curve(f"method {n}", [0, 1], [n, n + 1]) for n in range(30)], "x", "y", (5, 3))
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}) == 30
