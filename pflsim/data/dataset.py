"""A labelled image data set in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Dataset:
    """Images and labels as arrays; the first `train_size` rows are the official training part, the rest the test part.

    Args:
        name: short name, e.g. "mnist".
        x: [n, channels, height, width] uint8, or [n, features] / [n, channels, height, width] float32 used as they are.
        y: [n] int64 labels in 0..num_classes-1.
        num_classes: how many classes there are.
        train_size: rows of the official training part.
        writers: [n] int64, who wrote each example, where known (for the partition by_writer).
        scale: what uint8 values are divided by (255 for images, 16 for the digits), so that inputs lie in [0, 1].
        mean, std: per channel, applied after scaling; None: inputs stay in [0, 1].
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    num_classes: int
    train_size: int
    writers: np.ndarray | None = None
    scale: float = 255.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example, without the batch axis."""
        return tuple(self.x.shape[1:])
