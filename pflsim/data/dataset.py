"""A labelled image data set in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pflsim.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Dataset:
    """A labelled data set. The first `train_size` rows are the official training part, the rest the test part.

    Args:
        name: short name, e.g. "mnist".
        x: [n, channels, height, width] uint8, or [n, features] / [n, channels, height, width] float32 without scaling.
        y: [n] int64 labels in 0..num_classes-1.
        num_classes: C.
        train_size: rows of the official training part.
        writers: [n] int64, the writer of each example, for partition=by_writer; None if unknown.
        scale: divisor that maps uint8 values to [0, 1]: 255 for images, 16 for digits.
        mean, std: statistics per channel for standardisation after scaling; None to omit it.
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
        """Return the shape of one example, without the batch axis."""
        return tuple(self.x.shape[1:])


class Loader(Protocol):
    """The target of the component `data`: `load()` with its settings filled in."""

    def __call__(self) -> Dataset:
        """Return the data set."""
        ...


def check_dataset(dataset: object, source: str) -> None:
    """Check that a loader returned a valid `Dataset`.

    Args:
        dataset: the returned object.
        source: name of the loader, for error messages.

    Raises:
        SettingsError: it is not a Dataset, or an array has a wrong type, shape or value.
    """
    if not isinstance(dataset, Dataset):
        raise SettingsError(f"{source} returned a {type(dataset).__name__}, expected a Dataset")
    x, y, n, writers = dataset.x, dataset.y, len(dataset.y), dataset.writers
    if (
        not isinstance(x, np.ndarray)
        or x.dtype not in (np.uint8, np.float32)
        or x.ndim < 2
        or len(x) != n
        or not x.size
    ):
        problem = f"x is {described(x)}, expected uint8 or float32 [{n}, ...]"
    elif not isinstance(y, np.ndarray) or y.dtype != np.int64 or y.ndim != 1:
        problem = f"y is {described(y)}, expected int64 [n]"
    elif not 1 <= dataset.train_size <= n:
        problem = f"train_size={dataset.train_size}, expected 1..{n}"
    elif dataset.num_classes < 1:
        problem = f"num_classes={dataset.num_classes}, expected at least 1"
    elif writers is not None and (writers.dtype != np.int64 or writers.shape != (n,)):
        problem = f"writers are {described(writers)}, expected int64 [{n}]"
    elif y.min() < 0 or y.max() >= dataset.num_classes:
        problem = f"labels are {y.min()}..{y.max()}, expected 0..{dataset.num_classes - 1}"
    elif x.dtype == np.float32 and not np.isfinite(x).all():
        problem = "x has values that are NaN or infinite; expected finite numbers"
    else:
        return
    raise SettingsError(f"{source}: {problem}")


def described(array: object) -> str:
    """Return the type and shape of an array for a message, e.g. "float64 [3, 2]"."""
    return f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
