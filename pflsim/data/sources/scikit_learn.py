"""Data sets that scikit-learn includes."""

from __future__ import annotations

from typing import Any

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
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return _split("digits", np.asarray(x, np.uint8).reshape(-1, 1, 8, 8), y, standardize, scale=16.0)


def wine(*, standardize: bool = True) -> Dataset:
    """Load the wines (UCI's Wine recognition data), included in scikit-learn.

    There is no official split; a fixed 80% of each class is the training part, for every seed.

    Args:
        standardize: standardise each feature with mean and variance of the training part.

    Returns:
        x [178, 13] float32, 3 classes.
    """
    from sklearn.datasets import load_wine

    x, y = load_wine(return_X_y=True)
    return _split("wine", np.asarray(x, np.float32), y, standardize)


def breast_cancer(*, standardize: bool = True) -> Dataset:
    """Load the tumours (UCI's Breast Cancer Wisconsin, Diagnostic), included in scikit-learn.

    There is no official split; a fixed 80% of each class is the training part, for every seed.

    Args:
        standardize: standardise each feature with mean and variance of the training part.

    Returns:
        x [569, 30] float32; class 0 is malignant, 1 benign.
    """
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return _split("breast_cancer", np.asarray(x, np.float32), y, standardize)


def _split(name: str, x: np.ndarray, y: Any, standardize: bool, scale: float = 255.0) -> Dataset:
    y = np.asarray(y, np.int64)
    return finished(fixed_split(Dataset(name, x, y, int(y.max()) + 1, len(y), scale=scale)), standardize)
