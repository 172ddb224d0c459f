"""A part of Fashion-MNIST, for cases that would take too long on all of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.sources.fashion_mnist import load


def few_fashion_mnist(*, root: str = "data", examples: int = 5000) -> Dataset:
    """The first images of Fashion-MNIST, training and test parts in their proportions.

    Args:
        root: folder of data sets.
        examples: how many, of both parts together.
    """
    whole = load(root=root)
    train = round(examples * whole.train_size / len(whole.y))
    rows = np.r_[:train, whole.train_size : whole.train_size + examples - train]
    return replace(whole, x=whole.x[rows], y=whole.y[rows], train_size=train)
