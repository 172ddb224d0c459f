"""Helpers of the sources: reading files, joining parts, a fixed train/test split, standardisation."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from pflsim.data.content import content_order
from pflsim.data.dataset import Dataset, check_dataset, described
from pflsim.errors import SettingsError

Standardize = bool | Literal["per_pixel"]
JUNK = {"@eadir", "#recycle", "$recycle.bin", "__macosx", "thumbs.db", "desktop.ini"}
"""What systems leave in folders of users, in lower case."""


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is none of the user's."""
    return name.startswith(".") or name.lower() in JUNK


def scale_of(x: np.ndarray) -> float:
    """Return `Dataset.scale` of uint8 inputs: 255, or 1 if they are only 0 and 1."""
    return 1.0 if x.dtype == np.uint8 and x.max(initial=0) <= 1 else 255.0


def entries(folder: Path) -> list[Path]:
    """Return the entries of a folder sorted by name, without hidden ones."""
    return sorted(entry for entry in folder.iterdir() if not is_hidden(entry.name))


def joined(name: str, parts: Sequence[tuple[np.ndarray, np.ndarray]], num_classes: int | None = None) -> Dataset:
    """Concatenate the official training and test parts; a validation part may be between them.

    Args:
        name: the data set's name.
        parts: x [n, ...] and targets of the training part, and of the test part if there is one. Targets are integer
            classes [n] or [n, 1], or labels or values as in `Dataset`.
        num_classes: C; None: largest label + 1.

    Raises:
        SettingsError: a part has not a label for each example, or the examples of the parts differ in type or shape.
    """
    (x, y), *_ = parts
    names = ("training part", *["validation part"] * (len(parts) > 2), "test part")
    for part, (inputs, labels) in zip(names, parts, strict=False):
        if inputs.shape[1:] != x.shape[1:] or inputs.dtype != x.dtype:
            raise SettingsError(f"{name}: x of the {part} is {described(inputs)}, but {described(x)} in training")
        if len(labels) != len(inputs) or labels.dtype.kind not in "iuf":
            raise SettingsError(f"{name}: labels of the {part} are {described(labels)}, expected {len(inputs)} numbers")
    x = np.concatenate([x for x, _ in parts])
    if y.size > len(y) or y.dtype.kind == "f":
        labels = np.concatenate([labels for _, labels in parts])
        return Dataset(name, x, labels, labels.shape[1], len(y), scale=scale_of(x))
    labels = np.concatenate([labels.reshape(-1).astype(np.int64) for _, labels in parts])
    classes = 1 + int(labels.max(initial=0)) if num_classes is None else num_classes
    return Dataset(name, x, labels, classes, len(y), scale=scale_of(x))


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
    return dataset.taken(rows, sum(map(len, train)))


def finished(dataset: Dataset, standardize: Standardize) -> Dataset:
    """Check a data set; return it, with mean and deviation of the scaled training part per channel if wanted.

    "per_pixel": of each pixel of each channel. A constant channel (feature, pixel) has the deviation 1.

    Raises:
        SettingsError: the data set is not valid, or cannot be standardised.
    """
    check_dataset(dataset, f"data of {dataset.name}")
    if not standardize:
        return dataset
    if dataset.kind == "token sequences":
        raise SettingsError(f"data.standardize=true: {dataset.name} has token sequences; leave it out")
    x = dataset.x[: dataset.train_size]
    axes = 0 if standardize == "per_pixel" else (0, *range(2, x.ndim))
    if x.dtype == np.uint8 and x.ndim > 2 and standardize != "per_pixel":
        counts = np.stack([np.bincount(x[:, c].ravel(), minlength=256) for c in range(x.shape[1])])
        values = np.arange(256) / dataset.scale
        mean = counts @ values / counts.sum(axis=1)
        std = np.sqrt((counts * (values - mean[:, None]) ** 2).sum(axis=1) / counts.sum(axis=1))
    else:
        scaled = x / (dataset.scale if x.dtype == np.uint8 else 1.0)
        mean, std = scaled.mean(axis=axes, dtype=np.float64), scaled.std(axis=axes, dtype=np.float64)
    std = np.where(std > 0, std, 1.0)
    return dataclasses.replace(dataset, mean=tuple(mean.ravel().tolist()), std=tuple(std.ravel().tolist()))
