"""Columns whose cells are names: clients, groups and labels; and labels that are numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from pflsim.config.names import pasted
from pflsim.data.sources.cells import NUMBERS, TRUTH, WORDS, as_number, names_of_cells, numbers_of_cells, without
from pflsim.data.targets import found_targets
from pflsim.errors import SettingsError

if TYPE_CHECKING:
    from pandas import Series

Missing = Sequence[str] | None
"""Words that are missing values, in lower case; None: undecided."""


def named_cells(column: Series, key: str, missing: Missing) -> Series:
    """Return names as in `names_of_cells`; words in `missing` are NaN, and `WORDS` if all other cells are numbers.

    Raises:
        SettingsError: there are `WORDS` among text, and `missing` does not say what they are.
    """
    names = names_of_cells(column)
    counts = names.value_counts()
    words = [name for name in map(str, counts.index) if name.lower() in WORDS]
    others = [name for name in map(str, counts.index) if name.lower() not in WORDS]
    if others and all(as_number(name) is not None for name in others):
        return without(names, {*WORDS, *(missing or ())})
    if words and missing is None:
        said = ", ".join(f"{counts[word]} cells {word}" for word in words)
        raise SettingsError(
            f"{key}: column {column.name!r} has {said}: {pasted('data.missing', words)} leaves these rows out, "
            "data.missing=[] keeps them as names"
        )
    return without(names, missing or ())


def numbered(names: Series) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the number [n] int64 of each name, -1 for NaN, and the names in their order.

    The order is that of the numbers, if all names are numbers, else that of the letters.
    """
    from pandas import Categorical

    order = sorted(names.dropna().unique())
    if all(as_number(name) is not None for name in order):
        order.sort(key=Decimal)
    return Categorical(names, order).codes.astype(np.int64), tuple(order)


def label_cells(column: Series, missing: Missing, declared: bool) -> Series:
    """Return the cells of the targets, of which missing ones are NaN: numbers as they are, or names.

    Args:
        column: of the targets.
        missing: see `Missing`.
        declared: whether the column is text by its type.
    """
    numbers = None if declared else numbers_of_cells(column, missing or ())
    if numbers is None:
        return named_cells(column, "data.label", missing)
    cells = column.where(~np.isnan(numbers))
    texts = () if column.dtype.kind in NUMBERS else names_of_cells(cells).dropna().unique()
    return named_cells(column, "data.label", missing) if any(map(_is_code, texts)) else cells


def _is_code(text: str) -> bool:
    """Return whether a text has digits that are more than a number: zeros before others, or too many for int64."""
    return bool(re.fullmatch(r"[-+]?0\d+|\+\d+|-?\d{19,}", text))


def targets_of(name: str, cells: Any, gaps: bool) -> tuple[np.ndarray, int, tuple[Any, ...] | None]:
    """Return what `found_targets` returns, for cells of `label_cells` without missing ones.

    Args:
        name: of the data, for messages.
        cells: [n].
        gaps: whether cells were missing, which turns integers into floating point.
    """
    from pandas import to_numeric

    if cells.dtype.kind in NUMBERS:
        y = np.asarray(cells.tolist())
    else:
        texts = cells.astype(str)
        known = {*texts.unique()}
        if {text.strip().lower() for text in known} <= {*TRUTH}:
            y = texts.str.strip().str.lower().eq("true").to_numpy(bool)
        elif any(as_number(text) is None or _is_code(text) for text in known):
            codes, order = numbered(cells)
            return codes, len(order), order
        else:
            y = np.asarray(to_numeric(texts))
    if gaps and y.dtype.kind == "f" and (y == np.rint(y)).all():
        y = y.astype(np.int64)
    return found_targets(name, y)
