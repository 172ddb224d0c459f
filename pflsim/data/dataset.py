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
    x, y, n = dataset.x, dataset.y, len(dataset.y)
    problems = {
        f"x is {_type_and_shape(x)}, expected uint8 or float32 [{n}, ...]": not isinstance(x, np.ndarray)
        or x.dtype not in (np.uint8, np.float32)
        or x.ndim < 2
        or len(x) != n
        or not x.size,
        f"y is {_type_and_shape(y)}, expected int64 [n]": not isinstance(y, np.ndarray)
        or y.dtype != np.int64
        or y.ndim != 1,
        f"train_size={dataset.train_size}, expected 1..{n}": not 1 <= dataset.train_size <= n,
        f"num_classes={dataset.num_classes}, expected at least 1": dataset.num_classes < 1,
        f"writers are {_type_and_shape(dataset.writers)}, expected int64 [{n}]": dataset.writers is not None
        and (dataset.writers.dtype != np.int64 or dataset.writers.shape != (n,)),
    }
    for problem, found in problems.items():
        if found:
            raise SettingsError(f"{source}: {problem}")
    if y.min() < 0 or y.max() >= dataset.num_classes:
        raise SettingsError(f"{source}: labels are {y.min()}..{y.max()}, expected 0..{dataset.num_classes - 1}")
    if x.dtype == np.float32 and not np.isfinite(x).all():
        raise SettingsError(f"{source}: x has values that are NaN or infinite; expected finite numbers")


def _type_and_shape(array: object) -> str:
    return f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
