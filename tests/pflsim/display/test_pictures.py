"""Matrices and partitions as pictures."""

import numpy as np
import pytest
from PIL import Image

from pflsim.display.pictures import draw_heatmaps, drawing, partition_figure
from pflsim.types import Axis, Matrix


def test_a_picture_of_nothing_can_be_drawn() -> None:
    nothing = Matrix("x", "X", Axis("a"), Axis("b"), np.full((3, 3), np.nan, np.float32))
    draw_heatmaps([nothing]).canvas.draw()


@pytest.mark.filterwarnings("error")
def test_names_that_a_font_lacks_are_drawn_without_a_warning() -> None:
    with drawing():
        matrix = Matrix("a", "A", Axis("a", ("日本病院",)), Axis("b"), np.ones((1, 1), np.float32))
        draw_heatmaps([matrix]).canvas.draw()


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([[0.9, 0.06, 0.04], [0.01, 0.97, 0.02], [0.1, 0.1, 0.8]], (0.0, 0.1)),  # a client's own weight does not count
        ([[1, 0.8, np.nan], [0.8, 1, 0.9], [np.nan, 0.9, 1]], (0.8, 0.9)),  # similarities
    ],
)
def test_the_scale_is_of_the_values_between_clients(values: list[list[float]], scale: tuple[float, float]) -> None:
    axes = map(Axis, ("client", "client") if scale[0] else ("receiver", "sender"))
    image = draw_heatmaps([Matrix("a", "A", *axes, np.array(values, np.float32))]).axes[0].images[0]
    assert (image.norm.vmin, image.norm.vmax) == pytest.approx(scale)


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (500, 100)])
def test_picture_is_small_and_not_blank(tmp_path, clients, classes):
    counts = np.random.default_rng(0).integers(0, 900, (clients, classes)) * (np.arange(classes) % 3 > 0)
    path = tmp_path / "p.png"
    partition_figure({"train": counts, "val": counts // 9, "test": counts // 4}, "made").savefig(path, dpi=100)
    assert 2_000 < path.stat().st_size < 200_000
    with Image.open(path) as image:
        assert 400 <= image.width <= 1600 and 300 <= image.height <= 1200
