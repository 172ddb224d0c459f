"""Data sets that scikit-learn includes, without importing it, which takes a second."""

import importlib.util
from pathlib import Path

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import finished, fixed_split


def digits(*, standardize: bool = False) -> Dataset:
    """Load the digits (the test part of UCI's Optical Recognition of Handwritten Digits), 16 grey levels.

    There is no official split; a fixed 80% of each class is the training part, for every seed.

    Args:
        standardize: standardise with statistics of the training part.

    Returns:
        x [1797, 1, 8, 8] uint8 in 0..16, 10 classes.
    """
    return _load("digits", "digits.csv.gz", standardize, np.uint8, (1, 8, 8), scale=16.0, header=0)


def wine(*, standardize: bool = True) -> Dataset:
    """Load the wines (UCI's Wine recognition data), included in scikit-learn.

    There is no official split; a fixed 80% of each class is the training part, for every seed.

    Args:
        standardize: standardise each feature with mean and variance of the training part.

    Returns:
        x [178, 13] float32, 3 classes.
    """
    return _load("wine", "wine_data.csv", standardize, np.float32, (13,))


def breast_cancer(*, standardize: bool = True) -> Dataset:
    """Load the tumours (UCI's Breast Cancer Wisconsin, Diagnostic), included in scikit-learn.

    There is no official split; a fixed 80% of each class is the training part, for every seed.

    Args:
        standardize: standardise each feature with mean and variance of the training part.

    Returns:
        x [569, 30] float32; class 0 is malignant, 1 benign.
    """
    return _load("breast_cancer", "breast_cancer.csv", standardize, np.float32, (30,))


def _load(
    name: str, file: str, standardize: bool, dtype: type, shape: tuple[int, ...], scale: float = 255.0, header: int = 1
) -> Dataset:
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "datasets/data" / file
    rows = np.loadtxt(path, delimiter=",", skiprows=header)
    x, y = rows[:, :-1].astype(dtype).reshape(-1, *shape), rows[:, -1].astype(np.int64)
    return finished(fixed_split(Dataset(name, x, y, int(y.max()) + 1, len(y), scale=scale)), standardize)
