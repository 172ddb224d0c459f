"""scikit-learn's handwritten digits: 1,797 images of 8×8, in the package itself, nothing to download."""

from __future__ import annotations

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import finished, fixed_split


def load(*, standardize: bool = False) -> Dataset:
    """Load the digits (the test part of UCI's Optical Recognition of Handwritten Digits), 16 grey levels.

    They have no official split; a fixed one, 80% of each class for training, serves as such (the same for every seed).

    Args:
        standardize: subtract the mean and divide by the deviation of the training part.

    Returns:
        x [1797, 1, 8, 8] uint8 in 0..16, 10 classes.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = images.astype(np.uint8).reshape(-1, 1, 8, 8)
    dataset = Dataset("digits", x, labels.astype(np.int64), 10, len(labels), scale=16.0)
    return finished(fixed_split(dataset), standardize)
