"""Matrices on the disk and as pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pflsim.errors import SettingsError
from pflsim.records.heatmaps import by_kind, draw_heatmaps
from pflsim.records.tensorboard import SHARE, Gallery
from pflsim.records.trace import DIAGNOSTICS, RoundMatrices, read_matrices, write_matrices
from pflsim.types import Axis, Matrix

Bounds = tuple[float, float] | None


def matrix(name: str = "alpha/conv", size: tuple[int, int] = (4, 4), bounds: Bounds = None) -> Matrix:
    values = np.random.default_rng(0).random(size).astype(np.float32)
    values[0, 1] = np.nan
    return Matrix(name, "Weights α", Axis("receiver"), Axis("sender", tuple(map(str, range(size[1])))), values, bounds)


def test_matrices_come_back_as_they_were(tmp_path: Path) -> None:
    written = RoundMatrices(7, (matrix(), matrix("psi", (2, 3), (0.0, 1.0))))
    write_matrices(tmp_path, written)
    found = read_matrices(tmp_path)
    assert found is not None
    assert found.round == 7
    for before, after in zip(written.matrices, found.matrices, strict=True):
        np.testing.assert_array_equal(before.values, after.values)
        assert (before.name, before.title, before.rows, before.columns, before.bounds) == (
            after.name, after.title, after.rows, after.columns, after.bounds,
        )  # fmt: skip


def test_no_matrices_and_damaged_ones(tmp_path: Path) -> None:
    assert read_matrices(tmp_path) is None
    (tmp_path / DIAGNOSTICS).write_bytes(b"no tensors")
    with pytest.raises(SettingsError, match=DIAGNOSTICS):
        read_matrices(tmp_path)


def test_the_scale_is_of_the_weights_between_clients() -> None:
    """A client's own weight, near 1, would leave the others in one colour."""
    values = np.array([[0.9, 0.06, 0.04], [0.01, 0.97, 0.02], [0.1, 0.1, 0.8]], np.float32)
    shown = Matrix("zeta/a", "Weights", Axis("receiver"), Axis("sender"), values)
    image = draw_heatmaps([shown]).axes[0].images[0]
    assert (image.norm.vmin, image.norm.vmax) == pytest.approx((0.0, 0.1))


def test_the_scale_of_similarities_is_of_those_there_are() -> None:
    values = np.array([[1, 0.8, np.nan], [0.8, 1, 0.9], [np.nan, 0.9, 1]], np.float32)
    image = draw_heatmaps([Matrix("s", "Similarity", Axis("client"), Axis("client"), values)]).axes[0].images[0]
    assert (image.norm.vmin, image.norm.vmax) == pytest.approx((0.8, 0.9))


@pytest.mark.parametrize(("values", "texts"), [([0.9, 0.4], 6 + 2), ([0.0, 0.3], 4 + 2)])
def test_numbers_are_written_unless_they_are_zero(values: list[float], texts: int) -> None:
    """Off the diagonal of three clients; two more values of 0.5 on it."""
    off = np.resize(np.array(values, np.float32), (3, 3))
    shown = np.where(np.eye(3, dtype=bool), np.array([0.5, 0.5, 0.0], np.float32), off)
    axes = draw_heatmaps([Matrix("zeta", "Weights", Axis("receiver"), Axis("sender"), shown)]).axes[0]
    assert len(axes.texts) == texts


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count"), [((1, 1), 9), ((100, 100), 3), ((3, 40), 4), ((60, 2), 1)])
def test_pictures_of_any_size_can_be_drawn(size: tuple[int, int], count: int) -> None:
    figure = draw_heatmaps([matrix(f"alpha/{n}", (max(size[0], 1), max(size[1], 2))) for n in range(count)], "Title")
    figure.canvas.draw()
    assert len([a for a in figure.axes if a.images]) == count


def test_a_picture_of_nothing_can_be_drawn() -> None:
    nothing = Matrix("x", "X", Axis("a"), Axis("b"), np.full((3, 3), np.nan, np.float32))
    draw_heatmaps([nothing]).canvas.draw()


def test_matrices_of_a_kind_are_drawn_together() -> None:
    kinds = by_kind([matrix("alpha/a"), matrix("psi"), matrix("alpha/b")])
    assert {kind: [m.name for m in found] for kind, found in kinds.items()} == {
        "alpha": ["alpha/a", "alpha/b"],
        "psi": ["psi"],
    }


def test_drawing_takes_its_share_of_the_time_and_the_last_round_is_drawn() -> None:
    """A clock that every picture moves by 1 s; 20 s pass between two rounds."""
    now, drawn = [0.0], []

    def put(kind: str, figure: object, round_number: int) -> None:
        now[0] += 1.0
        drawn.append((round_number, now[0]))

    gallery = Gallery(put, lambda: now[0])
    for number in range(1, 20):
        gallery.show(RoundMatrices(number, (matrix(),)))
        now[0] += 20.0
    assert [at for at, _ in drawn] == [3, 11, 16]
    assert all(number <= SHARE * at + 1 for number, (_, at) in enumerate(drawn, start=1))
    gallery.close()
    gallery.close()
    assert [at for at, _ in drawn] == [3, 11, 16, 19]


def test_a_picture_that_cannot_be_drawn_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    def put(kind: str, figure: object, round_number: int) -> None:
        raise ValueError("no such font")

    gallery = Gallery(put)
    gallery.show(RoundMatrices(4, (matrix(),)))
    gallery.close()
    assert "round 4" in caplog.text and "no such font" in caplog.text
