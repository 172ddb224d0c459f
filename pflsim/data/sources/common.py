"""Helpers of the sources: file lookup, joining parts, a fixed train/test split, standardisation, downloads."""

from __future__ import annotations

import dataclasses
import stat
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pflsim.config.names import shortened
from pflsim.data.content import content_order
from pflsim.data.dataset import Dataset
from pflsim.errors import SettingsError

MAX_CLASSES = 100_000
"""Limit on labels, to detect invalid files."""


def has_file(path: Path, setting: str = "data.root") -> bool:
    """Return whether a path is a regular file.

    Raises:
        SettingsError: the path cannot be read, e.g. for lack of permission.
    """
    return _has_type(path, stat.S_ISREG, setting)


def has_folder(path: Path, setting: str = "data.root") -> bool:
    """Return whether a path is a folder.

    Raises:
        SettingsError: as for `has_file`.
    """
    return _has_type(path, stat.S_ISDIR, setting)


def _has_type(path: Path, kind: Callable[[int], bool], setting: str) -> bool:
    try:
        return kind(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SettingsError(f"{setting}: {shortened(str(path))} cannot be read: {reason(error)}") from error


def entries(folder: Path) -> list[Path]:
    """Return the entries of a folder sorted by name, without hidden ones.

    Raises:
        SettingsError: the folder cannot be read.
    """
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise SettingsError(f"{folder} cannot be listed: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return an error's message in one line, or its type if it has none."""
    system_message = error.strerror if isinstance(error, OSError) else None
    return (system_message or str(error) or type(error).__name__).partition("\n")[0]


def joined(
    name: str, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], num_classes: int
) -> Dataset:
    """Concatenate the official training and test parts, (x, y) each."""
    x = np.concatenate([train[0], test[0]])
    y = np.concatenate([train[1], test[1]]).astype(np.int64)
    return Dataset(name, x, y, num_classes, len(train[1]))


def check_together(one: Path, x: np.ndarray, other: Path, x_other: np.ndarray) -> None:
    """Check that the examples of two files have the same shape.

    Raises:
        SettingsError: they differ.
    """
    if x.shape[1:] != x_other.shape[1:]:
        raise SettingsError(
            f"{other} holds examples of shape {list(x_other.shape[1:])}, expected {list(x.shape[1:])} as in {one}"
        )


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


def standardized(dataset: Dataset) -> Dataset:
    """Add the mean and standard deviation per channel (or feature) of the scaled training part.

    A constant channel has the deviation 1.
    """
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


def finished(dataset: Dataset, standardize: bool) -> Dataset:
    """Return the data set, with standardisation if requested."""
    return standardized(dataset) if standardize else dataset


def not_found(name: str, folder: Path, files: Sequence[str], can_download: bool = True) -> SettingsError:
    """Return the error for missing files, with the expected files and remedies."""
    remedy = f"put them there, or set data.root=DIR to their folder (looked in {folder.absolute()})"
    if can_download:
        remedy += ", or allow the download with data.download=true"
    return SettingsError(f"{name} was not found: expected {', '.join(files)} in {folder}; {remedy}")


def download(name: str, fetch: Callable[[], object], folder: Path) -> None:
    """Run a torchvision download.

    Raises:
        SettingsError: it failed.
    """
    try:
        fetch()
    except (OSError, EOFError, RuntimeError, ValueError, tarfile.TarError, zipfile.BadZipFile) as error:
        # URLError is an OSError; torchvision raises RuntimeError; the archive may be damaged
        raise SettingsError(
            f"the download of {name} into {folder.absolute()} failed ({reason(error)}); "
            "check the network, or put the files there by hand"
        ) from error
