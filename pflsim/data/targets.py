"""What the targets of a data set are: classes, labels, or values; and their conversion to what a run asks for."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from pflsim.config.names import some
from pflsim.data.dataset import MAX_CLASSES, Card, Dataset, described
from pflsim.errors import SettingsError
from pflsim.types import TaskName

MAX_FOUND = 20
"""More different integers in a table are not taken for classes unless the run says so."""


def found_targets(name: str, given: np.ndarray) -> tuple[np.ndarray, int, tuple[Any, ...] | None]:
    """Return targets in the form of `Dataset.y`, found from values of any type.

    Text, booleans and integers are classes, numbered in sorted order unless they begin at 0 and end below MAX_CLASSES;
    a matrix of 0 and 1 is labels; floating point numbers are values of regression, unless they are only 0 and 1.

    Args:
        name: of the data, for messages.
        given: [n], [n, 1] or [n, T].

    Returns:
        `y`, `num_classes` and `values` of a `Dataset`.

    Raises:
        SettingsError: they are something else.
    """
    y = given[:, 0] if given.ndim == 2 and given.shape[1] == 1 else given
    if y.dtype.kind == "O" and all(isinstance(value, str) for value in y.flat):
        y = y.astype(str)
    if y.dtype.kind not in "iufbU" or y.ndim > 2 or (y.ndim == 2 and y.dtype.kind == "U"):
        raise SettingsError(f"{name}: labels are {described(given)}, expected numbers or text [n], or numbers [n, T]")
    binary = y.dtype.kind != "U" and np.isin(y, (0, 1)).all()
    if y.ndim == 2 and binary:
        return y.astype(np.int64), y.shape[1], None
    if y.ndim == 2 or (y.dtype.kind == "f" and not binary):
        return y.reshape(len(y), -1).astype(np.float32), 1 if y.ndim == 1 else y.shape[1], None
    if y.dtype.kind == "b":
        return y.astype(np.int64), 2, (False, True)
    y = y.astype(np.int64) if y.dtype.kind == "f" else y
    values, numbers = np.unique(y, return_inverse=True)
    if y.dtype.kind != "U" and values[0] == 0 and values[-1] < MAX_CLASSES:
        return y.astype(np.int64), int(values[-1]) + 1, tuple(range(int(values[-1]) + 1))
    return numbers.astype(np.int64), len(values), tuple(values.tolist())


def as_task(dataset: Dataset, asked: TaskName | Literal["auto"]) -> Dataset:
    """Return the data set with the targets of a task.

    Args:
        dataset: the data set.
        asked: the task; auto: that of the targets, where labels of which every row has exactly one are classes.

    Raises:
        SettingsError: the targets are not of this task, or `auto` cannot decide it.
    """
    y, found, values = dataset.y, dataset.task, dataset.values
    one_hot = y.ndim == 2 and y.shape[1] > 1 and np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all()
    if asked in ("auto", "classification") and one_hot:
        said = f"{dataset.name}: every row of the targets has exactly one 1, so the columns are classes"
        told = (f"{said}; task=multilabel makes them labels",) if asked == "auto" else ()
        return replace(dataset, y=y.argmax(1), notes=(*dataset.notes, *told))
    if asked == "auto" and values and dataset.kind == "tables" and (count := len(np.unique(y))) > MAX_FOUND:
        is_text = isinstance(values[0], str)
        if not is_text or count > len(y) / 2:
            said = f"the labels of {dataset.name} are {'text' if is_text else 'integers'} with {count} values"
            raise SettingsError(f"data: {said}; set task=classification, or task=regression for a column of numbers")
    if asked in ("auto", found):
        return dataset
    numbers: Sequence[Any] = values or range(dataset.num_classes)
    if asked == "regression" and not isinstance(numbers[0], str):
        y = np.array(numbers)[y][:, None] if y.ndim == 1 else y
        return replace(dataset, y=y.astype(np.float32), num_classes=y.shape[1], values=None)
    if asked == "multilabel" and found == "classification":
        return replace(dataset, y=np.eye(dataset.num_classes, dtype=np.int64)[y], values=None)
    if asked == "classification" and y.shape[1] == 1:
        classes, places = np.unique(y[:, 0], return_inverse=True)
        return replace(dataset, y=places.astype(np.int64), num_classes=len(classes), values=tuple(classes.tolist()))
    texts = f" (text: {some(numbers)})" if isinstance(numbers[0], str) else ""
    raise SettingsError(f"task={asked}: the targets of {dataset.name} are those of {found}{texts}; use task={found}")


def about_targets(dataset: Dataset) -> str:
    """Return the classes or labels with their numbers of examples, or the range of the values, for a card."""
    if dataset.task == "regression":
        return f"{dataset.y.min():g} to {dataset.y.max():g}, mean {dataset.y.mean():.4g}"
    counts = np.bincount(dataset.y, minlength=dataset.num_classes) if dataset.y.ndim == 1 else dataset.y.sum(axis=0)
    names = dataset.values or range(len(counts))
    each = ", ".join(f"{name} {count:,}" for name, count in zip(names, counts.tolist(), strict=True))
    return f"{len(counts)} {'classes' if dataset.y.ndim == 1 else 'labels'}: {each}"


def array_card(dataset: Dataset) -> Card:
    """Return the card of data that are arrays."""
    x, test = dataset.x, len(dataset.y) - dataset.train_size
    span = f"{x.min():g} to {x.max():g}"
    return Card((
        ("examples", f"{dataset.train_size:,} for training, {test:,} for tests"),
        ("inputs", f"{dataset.kind} {'x'.join(map(str, x.shape[1:]))}, {x.dtype}, {span}"),
        ("label", about_targets(dataset)),
    ))  # fmt: skip
