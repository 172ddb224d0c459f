"""A subset of Fashion-MNIST, for cases that would take too long on the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.sources.fashion_mnist import load


def few_fashion_mnist(*, root: str = "data", examples: int = 5000) -> Dataset:
    """Load the first images of Fashion-MNIST, with the original proportion of training and test images.

    Args:
        root: the folder of the data sets.
        examples: the number of training and test images together.
    """
    whole = load(root=root)
    train = round(examples * whole.train_size / len(whole.y))
    rows = np.r_[:train, whole.train_size : whole.train_size + examples - train]
    return replace(whole, x=whole.x[rows], y=whole.y[rows], train_size=train)
