"""A subset of Fashion-MNIST, for cases that would take too long on the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.sources.torchvision_sets import fashion_mnist


def few_fashion_mnist(*, root: str = "data", examples: int = 5000) -> Dataset:
    """Load the first images of Fashion-MNIST, with the original proportion of training and test images.

    Args:
        root: the folder of the data sets.
        examples: the number of training and test images together.
    """
    whole = fashion_mnist(root=root)
    train = round(examples * whole.train_size / len(whole.y))
    rows = np.r_[:train, whole.train_size : whole.train_size + examples - train]
    return replace(whole, x=whole.x[rows], y=whole.y[rows], train_size=train)


def random_images(*, examples: int = 70_000, seed: int = 0) -> Dataset:
    """Draw images in the shape of Fashion-MNIST's, with the mean of each image set by its label.

    Args:
        examples: the number of training and test images together.
        seed: of the draw.
    """
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 10, examples)
    x = draw.integers(0, 200, (examples, 1, 28, 28), dtype=np.uint8) + (5 * y).astype(np.uint8)[:, None, None, None]
    return Dataset("random_images", x, y, 10, examples * 6 // 7)
