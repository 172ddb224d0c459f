"""Helpers of the sources: file lookup, checks, joining parts, a fixed train/test split, standardisation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pflsim.data.content import content_order
from pflsim.data.dataset import Dataset, described
from pflsim.errors import SettingsError

MAX_CLASSES = 100_000
"""Limit on labels, to detect invalid files."""


def entries(folder: Path) -> list[Path]:
    """Return the entries of a folder sorted by name, without hidden ones."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def reason(error: BaseException) -> str:
    """Return an error's message in one line, or its type if it has none."""
    system_message = error.strerror if isinstance(error, OSError) else None
    return (system_message or str(error) or type(error).__name__).partition("\n")[0]


def checked_labels(where: str, y: np.ndarray, examples: int, num_classes: int) -> np.ndarray:
    """Return labels as int64.

    Args:
        where: file and name of the labels, for messages.
        y: [n] labels as stored.
        examples: the number of examples that they belong to.
        num_classes: C.

    Raises:
        SettingsError: they are not [n] integers from 0 to C − 1, or there are none.
    """
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise SettingsError(f"{where} is {described(y)}, expected integer labels [n]")
    if len(y) != examples or not examples:
        raise SettingsError(f"{where} has {len(y)} labels for {examples} examples; expected equal numbers, at least 1")
    if y.min() < 0 or y.max() >= num_classes:
        raise SettingsError(f"{where} holds labels {y.min()}..{y.max()}, expected 0..{num_classes - 1}")
    return y.astype(np.int64)


def joined(
    name: str, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], num_classes: int
) -> Dataset:
    """Concatenate the official training and test parts, (x, y) each.

    Raises:
        SettingsError: the examples of the parts differ in type or shape.
    """
    (x, y), (x_test, y_test) = train, test
    if x.shape[1:] != x_test.shape[1:] or x.dtype != x_test.dtype:
        raise SettingsError(
            f"{name}: the test part has {x_test.dtype} examples of shape {list(x_test.shape[1:])}, expected {x.dtype} "
            f"{list(x.shape[1:])} as in the training part"
        )
    return Dataset(name, np.concatenate([x, x_test]), np.concatenate([y, y_test]), num_classes, len(y))


def fixed_split(dataset: Dataset, share: float = 0.8) -> Dataset:
    """Split data without an official split: `share` of each class is for training.

    The content of the examples determines the split, so it is the same in all runs and for any stored order.

    Args:
        dataset: the data set; its `train_size` is ignored.
        share: training fraction of each class, rounded half up. A class of two or more has an example in both parts.

    Returns:
        The same examples, training part first.
    """
    order = content_order(dataset)
    train, test = [], []
    for c in range(dataset.num_classes):
        rows = order[dataset.y[order] == c]
        size = int(share * len(rows) + 0.5)
        size = min(max(size, 1), len(rows) - 1) if len(rows) > 1 else len(rows)
        train.append(rows[:size])
        test.append(rows[size:])
    rows = np.concatenate([np.sort(np.concatenate(train)), np.sort(np.concatenate(test))])
    writers = None if dataset.writers is None else dataset.writers[rows]
    return dataclasses.replace(
        dataset, x=dataset.x[rows], y=dataset.y[rows], writers=writers, train_size=sum(len(part) for part in train)
    )


def finished(dataset: Dataset, standardize: bool) -> Dataset:
    """Return the data set, with the mean and deviation per channel (or feature) of the scaled training part if wanted.

    A constant channel has the deviation 1.
    """
    if not standardize:
        return dataset
    if dataset.kind == "token sequences":
        raise SettingsError(f"data.standardize=true: {dataset.name} has token sequences; leave it out")
    x = dataset.x[: dataset.train_size]
    axes = (0, *range(2, x.ndim))
    if x.dtype == np.uint8 and x.ndim > 2:
        counts = np.stack([np.bincount(x[:, c].ravel(), minlength=256) for c in range(x.shape[1])])
        values = np.arange(256) / dataset.scale
        mean = counts @ values / counts.sum(axis=1)
        std = np.sqrt((counts * (values - mean[:, None]) ** 2).sum(axis=1) / counts.sum(axis=1))
    else:
        scaled = x / (dataset.scale if x.dtype == np.uint8 else 1.0)
        mean, std = scaled.mean(axis=axes, dtype=np.float64), scaled.std(axis=axes, dtype=np.float64)
    std = np.where(std > 0, std, 1.0)
    return dataclasses.replace(dataset, mean=tuple(map(float, mean)), std=tuple(map(float, std)))


def not_found(name: str, folder: Path, files: Sequence[str], can_download: bool = True) -> SettingsError:
    """Return the error for missing files, with the expected files and remedies."""
    remedy = f"put them there, or set data.root=DIR to their folder (looked in {folder.absolute()})"
    if can_download:
        remedy += ", or allow the download with data.download=true"
    return SettingsError(f"{name} was not found: expected {', '.join(files)} in {folder}; {remedy}")
