"""A labelled data set in memory: images, tables or token sequences."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from pflsim.config.names import some
from pflsim.errors import SettingsError
from pflsim.types import TaskName

MAX_RMS = 10.0
"""Limit on the root mean square of inputs; standardised ones have 1, and grey levels in 0..255 about 90."""
MAX_CLASSES, MAX_TOKENS = 100_000, 10_000_000
"""Limits on labels and tokens: other numbers were meant, or the file is invalid."""
MAX_NAMED = 10
"""Maximum number of classes that a warning names."""
IGNORED = -100
"""The target where no next token is predicted, as in transformers."""
BINS = 10
"""The number of quantiles of a target of regression, by default of `partition.bins`."""
WIDTH = 100
"""Characters in a line of a card."""
MASKED = "there are masked values; fill them, or leave their rows out"
TARGETS = {(np.dtype(np.int64), 1), (np.dtype(np.int64), 2), (np.dtype(np.float32), 2)}
"""Types and numbers of axes of targets."""
Kind = Literal["images", "tables", "token sequences"]
"""Kind of inputs."""


@dataclass(frozen=True, slots=True)
class Card:
    """What was read; prints as a table.

    Args:
        lines: what, and the figures that its owner knows.
        columns: all columns of a table: name, kind, and more by kind.
    """

    lines: tuple[tuple[str, str], ...] = ()
    columns: tuple[Mapping[str, Any], ...] = ()

    def __str__(self) -> str:
        first = max((len(what) for what, _ in self.lines), default=0) + 2
        cut = (textwrap.shorten(text, WIDTH - first, placeholder=" ...") for _, text in self.lines)
        return "\n".join(f"{what:{first}}{text}" for (what, _), text in zip(self.lines, cut, strict=True))

    __repr__ = __str__

    def record(self) -> dict[str, Any]:
        """Return the content of data_card.json."""
        return {"card": dict(self.lines), "columns": list(self.columns)}


@dataclass(frozen=True, slots=True)
class Dataset:
    """A labelled data set. The first `train_size` rows are the official training part, the rest the test part.

    Args:
        name: short name, e.g. "mnist".
        x: images [n, channels, height, width] or tables [n, features], uint8, or float32 without scaling; or token
            sequences [n, length] int64.
        y: classes [n] int64 in 0..num_classes-1; or labels [n, L] int64, 0 or 1; or values [n, T] float32; or next
            tokens [n, length] int64, −100 where none is predicted.
        num_classes: C, L or T; of next tokens V.
        train_size: rows of the official training part.
        clients: [n] int64 or text, the client of each example (a person, a hospital, a device), for
            partition=by_client; None if unknown. Text is numbered in sorted order.
        client_names: of the clients 0, 1, ...; empty: their numbers.
        domains: if `clients` are domains: the number of clients that share each; partition and split rules apply within
            a domain. (): they are not.
        scale: divisor that maps uint8 values to [0, 1]: 255 for images, 16 for digits.
        mean, std: statistics for standardisation after scaling, of each channel or, channel by channel, of each pixel;
            None to omit it.
        vocabulary: of token sequences: the number V of different tokens, 0..V-1; None: the largest + 1.
        values: what the classes 0, 1, ... are in the data, where classes were found from the values of the targets.
        fields: for models that take a mapping of tensors: names of the token sequences that x stacks on its second
            axis, [n, fields, length], for example ("input_ids", "attention_mask"); empty: the model takes x.
        content: [n, d], what identifies the examples instead of x; None: x.
        fit: returns the data set with the inputs that a partition's training rows determine, and of documents that are
            divided into other rows also their partition; None: x are the inputs.
        encoder: what maps the rows of a table or texts to inputs; None: the data are neither.
        notes: what the user should know about how the data were read; a run warns of them.
        groups: [n] int64, of rows that stay on one side of a division into training and test examples; None: there
            are none.
        rows: [n] int64, the numbers of the examples in the user's files, from 0 through the training and then the test
            file; None: 0, 1, ..., since no rows were left out.
        card: what was read.
        language: whether the targets are next tokens.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    num_classes: int
    train_size: int
    clients: np.ndarray | None = None
    client_names: tuple[str, ...] = ()
    domains: tuple[int, ...] = ()
    scale: float = 255.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    vocabulary: int | None = None
    values: tuple[Any, ...] | None = None
    fields: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    content: np.ndarray | None = None
    fit: Callable[[Dataset, Any], Dataset | tuple[Dataset, Any]] | None = None
    encoder: Any = None
    groups: np.ndarray | None = None
    rows: np.ndarray | None = None
    card: Card = Card()
    language: bool = False

    def __post_init__(self) -> None:
        given = np.asarray(self.clients)
        if given.dtype.kind in "OU" and given.ndim and all(isinstance(name, str) for name in given):
            names, numbers = np.unique(given, return_inverse=True)
            object.__setattr__(self, "clients", numbers.astype(np.int64))
            object.__setattr__(self, "client_names", tuple(" ".join(name.split()) for name in names))

    def taken(self, rows: np.ndarray, train_size: int) -> Dataset:
        """Return the data set with some of its rows, in their order, the first of which are the training part."""
        names = ("x", "y", "clients", "groups", "rows")
        own = {name: None if (of := getattr(self, name)) is None else of[rows] for name in names}
        return replace(self, **own, train_size=train_size)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Return the shape of one example, without the batch axis."""
        return tuple(self.x.shape[1:])

    @property
    def kind(self) -> Kind:
        """Return what kind of inputs these are."""
        return "token sequences" if self.x.dtype == np.int64 else "images" if self.x.ndim == 4 else "tables"

    @property
    def task(self) -> TaskName:
        """Return what the targets are of."""
        if self.language:
            return "language_model"
        return "classification" if self.y.ndim == 1 else "regression" if self.y.dtype == np.float32 else "multilabel"

    def by_class(self, bins: int = BINS, rows: np.ndarray | slice = slice(None)) -> Dataset:
        """Return the data set with a class for each example, by which partitions and splits deal the examples.

        Args:
            bins: of regression, the number of quantiles of the first target, which are the classes. A multilabel
                example has the class of its first label, or one of its own without labels. Texts whose next tokens are
                predicted have one class.
            rows: decide these quantiles.
        """
        if self.task == "classification":
            return self
        if self.language:
            y, classes = np.zeros(len(self.y)), 1
        elif self.task == "multilabel":
            y, classes = np.where(self.y.any(1), self.y.argmax(1), self.num_classes), self.num_classes + 1
        else:
            ends = np.quantile(self.y[rows, 0], np.arange(1, bins) / bins)
            y, classes = np.searchsorted(ends, self.y[:, 0], side="right"), bins
        return replace(self, y=y.astype(np.int64), num_classes=classes)

    @property
    def tokens(self) -> int | None:
        """Return V of token sequences; None for other inputs."""
        return (self.vocabulary or int(self.x.max()) + 1) if self.kind == "token sequences" else None


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
    for problem in _problems(dataset):
        raise SettingsError(f"{source}: {problem}")


def _problems(dataset: Dataset) -> Iterator[str]:
    """Yield what makes a data set invalid. A check relies on those before it, so only the first problem counts."""
    x, y, n, classes, fields = dataset.x, dataset.y, len(dataset.y), dataset.num_classes, dataset.fields
    limit = min(dataset.vocabulary or MAX_TOKENS, MAX_TOKENS)
    types = (np.uint8, np.float32, np.int64)
    if not isinstance(x, np.ndarray) or x.dtype not in types or x.ndim < 2 or len(x) != n or not x.size:
        yield f"x is {described(x)}, expected uint8 or float32 [{n}, ...], or int64 tokens [{n}, length]"
    if fields and (x.dtype != np.int64 or x.ndim != 3 or x.shape[1] != len(fields)):
        yield f"x is {described(x)} with fields {fields}, expected int64 [{n}, {len(fields)}, length]"
    if x.dtype == np.int64 and (x.ndim != 2 + bool(fields) or x.min() < 0 or x.max() >= limit):
        yield (
            f"x is {described(x)} with tokens {x.min()}..{x.max()}, expected [{n}, length] with 0..{limit - 1} "
            f"(data.vocabulary={dataset.vocabulary}); store a table as float32"
        )
    if np.ma.is_masked(x) or np.ma.is_masked(y):
        yield MASKED
    if not isinstance(y, np.ndarray) or (y.dtype, y.ndim) not in TARGETS:
        yield f"y is {described(y)}, expected classes int64 [n], labels int64 [n, L] or values float32 [n, T]"
    if not (1 <= dataset.train_size <= n and 1 <= classes <= MAX_CLASSES):
        yield f"train_size={dataset.train_size} and num_classes={classes}, expected 1..{n} and 1..{MAX_CLASSES}"
    if (clients := dataset.clients) is not None and (clients.dtype != np.int64 or clients.shape != (n,)):
        yield f"clients are {described(clients)}, expected int64 [{n}]"
    if dataset.language:
        return
    if y.ndim == 2 and (y.shape[1] != classes or not np.isfinite(y).all()):
        yield f"y is {described(y)}, expected {classes} columns of finite numbers"
    if dataset.task == "multilabel" and not np.isin(y, (0, 1)).all():
        yield f"labels are {y.min()}..{y.max()}, expected 0 or 1"
    if y.ndim == 1 and (y.min() < 0 or y.max() >= classes):
        yield f"labels are {y.min()}..{y.max()}, expected 0..{classes - 1}"
    if x.dtype == np.float32 and not np.isfinite(x).all():
        yield "x has values that are NaN, infinite or beyond float32; expected finite numbers"


def dataset_warnings(dataset: Dataset) -> tuple[str, ...]:
    """Return what is probably wrong with a valid data set: one line each, for the user."""
    found, y = list(dataset.notes), dataset.y[: dataset.train_size]
    empty = np.flatnonzero(np.bincount(y, minlength=dataset.num_classes) == 0) if y.ndim == 1 else y[:0]
    if len(empty):
        why = f"; labels begin at {dataset.y.min()}, expected 0" if dataset.y.min() > 0 else ""
        tested = np.isin(dataset.y[dataset.train_size :], empty).sum()
        why += f"; {tested} test rows have them" * bool(tested)
        lacking = f"{len(empty)} of {dataset.num_classes} classes have no training examples"
        found.append(f"{dataset.name}: {lacking}: {named_classes(dataset, empty)}{why}")
    if dataset.x.dtype == np.float32 and dataset.mean is None:
        x = dataset.x.ravel()
        with np.errstate(over="ignore"):
            size = float(np.sqrt(np.dot(x, x) / x.size))
        if size > MAX_RMS:
            remedy = "set data.standardize=true, or divide them, for example by 255"
            remedy = "are columns of data.test in other units?" if dataset.encoder else remedy
            said = f"inputs are not scaled (root mean square {size:.4g}), so training may diverge"
            found.append(f"{dataset.name}: {said}; {remedy}")
    return tuple(found)


def named_classes(dataset: Dataset, classes: np.ndarray) -> str:
    """Return the first `MAX_NAMED` of some classes as they are called in the data."""
    return some((dataset.values[c] if dataset.values else c for c in classes.tolist()), MAX_NAMED)


def described(array: object) -> str:
    """Return the type and shape of an array for a message, e.g. "float64 [3, 2]"."""
    return f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
