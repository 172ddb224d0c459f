"""Corruptions against closed forms, and the data that they refuse."""

import colorsys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import dataset, refusing

from pflsim.config.settings import CORRUPTIONS
from pflsim.data.corruptions import Corruptor, fitting

RNG = np.random.default_rng(0)
GREY, COLOURS = np.full((3, 200, 200), 0.5, np.float32), RNG.random((3, 8, 8), np.float32)
POINT = np.zeros((1, 31, 31), np.float32)
POINT[0, 15, 15] = 1


def corrupted(name: str, x: np.ndarray, severity: int, digest: str = "a", client: int = 0, **of: Any) -> np.ndarray:
    none = np.zeros(0)
    return Corruptor(severity, 0, of.get("mean", none), of.get("std", none))(name, x, digest, client)


def contrast_ratio(x: np.ndarray) -> float:
    parts = [each - each.mean((1, 2), keepdims=True) for each in (x, COLOURS)]
    return parts[0].var() / parts[1].var()


def brighter(c: float) -> np.ndarray:
    """The same by the standard library, pixel by pixel."""
    hsv = (colorsys.rgb_to_hsv(*pixel) for pixel in COLOURS.reshape(3, -1).T.astype(float))
    return np.array([colorsys.hsv_to_rgb(h, s, min(v + c, 1)) for h, s, v in hsv]).T.reshape(COLOURS.shape)


CLOSED: list[tuple[str, int, np.ndarray, Callable[[np.ndarray], Any], Any, float]] = [
    ("gaussian_noise", 1, GREY, np.std, 0.04, 2e-4),
    ("gaussian_noise", 5, GREY, np.std, 0.10, 5e-4),
    ("shot_noise", 1, GREY, np.var, 0.5 / 500, 2e-5),
    ("shot_noise", 5, GREY, np.var, 0.5 / 50, 1e-4),
    ("impulse_noise", 1, GREY, lambda x: (x != 0.5).mean(), 0.01, 1e-3),
    ("impulse_noise", 5, GREY, lambda x: (x == 1).mean() / (x != 0.5).mean(), 0.5, 0.02),
    ("gaussian_blur", 5, POINT, lambda x: (x[0, 15, 15], x.sum()), (0.159156, 1), 1e-6),
    ("contrast", 3, COLOURS, contrast_ratio, 0.4**2, 1e-6),
    ("brightness", 4, COLOURS, lambda x: x, brighter(0.2), 1e-7),
    ("brightness", 4, 0 * COLOURS, lambda x: x, 0.2, 1e-7),
    ("pixelate", 5, np.kron(np.eye(2, dtype=np.float32), np.ones((1, 5, 5), np.float32)), lambda x: x[0, 0, 0], 1, 0),
    ("jpeg", 5, np.full((3, 16, 16), 128 / 255, np.float32), np.unique, 128 / 255, 1e-7),
]
"""Name, severity, image, what is measured of the result, the expected value, and the tolerance."""


@pytest.mark.parametrize(("name", "severity", "image", "measured", "expected", "tolerance"), CLOSED)
def test_images(name: str, severity: int, image: Any, measured: Any, expected: Any, tolerance: float) -> None:
    found = corrupted(name, image, severity)
    assert found.dtype == np.float32 and found.shape == image.shape and found.min() >= 0 and found.max() <= 1
    np.testing.assert_allclose(measured(found), expected, rtol=0, atol=tolerance)
    one = corrupted(name, image[:1], severity)
    assert one.shape == (1, *image.shape[1:]) and np.array_equal(one, corrupted(name, image[:1], severity))


def test_tables() -> None:
    """Noise in the unit of each column; the same columns are missing in all rows of a client."""
    mean, std = np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([1.0, 2.0, 0.0, 3.0, 1.0])
    x = RNG.normal(3, 1, (4000, 5)).astype(np.float32)
    noisy = np.stack([corrupted("feature_noise", row, 4, str(n), std=std) for n, row in enumerate(x)])
    np.testing.assert_allclose((noisy - x).std(0), 0.5 * std, rtol=0.05)
    holes = np.stack([corrupted("missing_columns", row, 3, str(n), 2, mean=mean) for n, row in enumerate(x[:9])])
    changed = (holes != x[:9]).any(0)
    assert changed.sum() == 2 and (holes[:, changed] == mean[changed].astype(np.float32)).all()
    others = {tuple(corrupted("missing_columns", x[0], 1, "a", client, mean=mean) != x[0]) for client in range(20)}
    assert {sum(each) for each in others} == {1} and len(others) > 1


def test_what_fits() -> None:
    images = dataset()
    table, tokens = replace(images, x=images.x[:, 0, 0]), replace(images, x=images.x[:, 0, 0].astype(np.int64))
    assert {*fitting(images, "mixture"), *fitting(table, "corrupted")} == {*CORRUPTIONS}
    unscaled = replace(images, x=images.x.astype(np.float32))
    for data, key in ((images, "missing_columns"), (table, "jpeg"), (tokens, "mixture"), (unscaled, "contrast")):
        with refusing(f"eval.sets={key}", data.name):
            fitting(data, key)
