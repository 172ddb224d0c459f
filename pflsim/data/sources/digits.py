"""The handwritten digits of scikit-learn: 1,797 images of 8×8, included in the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import finished, fixed_split


def load(*, standardize: bool = False) -> Dataset:
    """Load the digits (the test part of UCI's Optical Recognition of Handwritten Digits), 16 grey levels.

    There is no official split; a fixed 80% of each class is the training part, for every seed.

    Args:
        standardize: standardise with statistics of the training part.

    Returns:
        x [1797, 1, 8, 8] uint8 in 0..16, 10 classes.
    """
    package = importlib.util.find_spec("sklearn")  # importing it takes seconds
    assert package is not None and package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "datasets/data/digits.csv.gz"
    rows = np.loadtxt(file, np.int64, delimiter=",")
    x = rows[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8)
    dataset = Dataset("digits", x, rows[:, -1].copy(), 10, len(rows), scale=16.0)
    return finished(fixed_split(dataset), standardize)
