"""The columns of a table: which are inputs, of what kind, what is doubtful about them, and the card of the table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pflsim.config.names import pasted, some
from pflsim.data.dataset import Card, Dataset
from pflsim.data.sources.cells import SAMPLE, WORDS, ZEROS, as_number, names_of_cells, numbers_of_cells, without
from pflsim.data.sources.frames import Rows, Source
from pflsim.data.targets import about_targets
from pflsim.errors import SettingsError

if TYPE_CHECKING:
    from pandas import Series

FEW = 20
"""Columns with at most so many different values can be categories, whatever their values are."""
LIMITS = ((FEW, 2), (50, 20))
"""Text with more different values than the first number, and fewer rows a value than the second, are no categories."""
CODES = (-9, -99, 99, 999, 9999)
"""Numbers that often mean a missing value."""
TIME = r"([ T]\d\d?:\d\d(:\d\d(\.\d+)?)?(Z|[-+]\d\d:?\d\d)?)?"
MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
DAY = rf"\d{{4}}[-/]\d\d?[-/]\d\d?|\d\d?\.\d\d?\.\d{{4}}|\d\d?/\d\d?/\d{{4}}|\d\d?[- ]?{MONTH}[- ]?\d{{2,4}}"
DATE = re.compile(f"({DAY}){TIME}", re.I)
MARKS = re.compile(r"[\s'’,%€$£¥]|\.(?=\d{3}(\D|$))")
"""Currencies, per cent, and marks of thousands."""
ROWS_A_VALUE = 5
"""A column with fewer rows a value can have one label for each by chance."""
ODD = "cMm"
"""Kinds of types that are neither numbers nor text: complex numbers, dates and durations."""


@dataclass(frozen=True, slots=True)
class Column:
    """An input.

    Args:
        name: of the column.
        cells: [n], numbers float64 or text; missing ones are NaN.
        is_number: whether its cells are numbers.
        counts: how many rows have each text, by text; of numbers {}.
        odd: what a column has that is neither numbers nor text, such as dates; it cannot be an input.
        code: one of the numbers as it is written, if it begins with a zero.
    """

    name: str
    cells: Series
    is_number: bool
    counts: dict[str, int] = field(default_factory=dict)
    odd: str = ""
    code: str = ""

    @property
    def missing(self) -> int:
        """Return the number of missing cells."""
        return int(self.cells.isna().sum())


def columns_of(rows: Rows, used: Sequence[str], categorical: Sequence[str], missing: Sequence[str]) -> Iterator[Column]:
    """Yield the inputs. A column is a number if all its cells are, see `numbers_of_cells`, and else a category.

    Args:
        rows: the table.
        used: names of the inputs.
        categorical: those that are categories whatever their cells are.
        missing: words that are missing values, in lower case.
    """
    from pandas import Series

    for name in used:
        column: Any = rows.frame[name]
        text = name in categorical or name in rows.declared
        if column.dtype == object and column.map(lambda cell: isinstance(cell, list | dict | np.ndarray)).any():
            yield Column(name, column, False, odd="lists or mappings")
        elif column.dtype.kind in ODD:
            yield Column(name, column, False, odd=str(column.dtype))
        elif not text and (numbers := numbers_of_cells(column, missing)) is not None:
            code = next(filter(re.compile(ZEROS).fullmatch, map(str, column)), "") if column.dtype == object else ""
            yield Column(name, Series(numbers, column.index, name=name), True, code=code)
        else:
            texts = without(names_of_cells(column), missing)
            yield Column(name, texts, False, {str(text): int(n) for text, n in texts.value_counts().items()})


def check_inputs(where: str, columns: Sequence[Column], named: Collection[str], excluded: Sequence[str]) -> None:
    """Raise a `SettingsError` for columns that cannot be meant as categories, all in one message.

    Args:
        where: the table, for the message.
        columns: the inputs.
        named: those that the settings name, which are categories if they are text.
        excluded: columns that are excluded already.
    """
    each = {c.name: f"is {c.odd}" for c in columns if c.odd}
    each |= {c.name: _no_category(c.counts) for c in columns if c.counts and c.name not in named}
    if found := {name: why for name, why in each.items() if why}:
        said = "; ".join(f"{name!r} {why}" for name, why in found.items())
        remedy = f"Leave them out with {pasted('data.exclude', [*excluded, *found])}, mend them"
        named_too = ", or name them in data.categorical or data.features" * any(
            c.counts for c in columns if c.name in found
        )
        raise SettingsError(
            f"{where}: columns that are neither numbers nor a few categories: {said}. {remedy}{named_too}"
        )


def _no_category(counts: Mapping[str, int]) -> str:
    """Return why texts, with their numbers of rows, are no categories; "" if they can be."""
    total = sum(counts.values())
    if all(DATE.fullmatch(text) for text in counts):
        return "has dates"
    words = [text for text in counts if as_number(text) is None]
    if len(counts) - len(words) > FEW and 2 * sum(counts[word] for word in words) <= total:
        return f"has numbers, but also {some(words)}" if words else "is text by its type, but has numbers"
    unmarked = {text: MARKS.sub("", text).replace("\N{MINUS SIGN}", "-") for text in words if text.lower() not in WORDS}
    marked = [text for text, number in unmarked.items() if as_number(number) is not None]
    if marked and 2 * sum(n for text, n in counts.items() if text not in words or text in marked) >= total:
        return f"has numbers with marks, such as {some(marked)}"
    if any(len(counts) > most and total < least * len(counts) for most, least in LIMITS):
        return f"is text with {len(counts)} different values in {total} rows"
    return ""


def doubts(name: str, columns: Sequence[Column], dataset: Dataset, missing: Sequence[str] | None) -> Iterator[str]:
    """Yield what is probably not as the user thinks: one line for each kind of doubt.

    Args:
        name: of the data.
        columns: the inputs.
        dataset: with the targets.
        missing: see `Missing`; None: words among categories are named.
    """
    words = [
        f"{column.counts[text]} cells {text} of {column.name!r}"
        for column in columns if missing is None for text in column.counts if text.lower() in WORDS
    ]  # fmt: skip
    if words:
        yield f"{name}: {', '.join(words)} are a category; data.missing=[...] lists words that are missing values"
    numbers = {column.name: column.cells.dropna().to_numpy() for column in columns if column.is_number}
    if ids := [each for each, cells in numbers.items() if _numbers_rows(cells)]:
        said = f"the inputs {', '.join(ids)} are whole numbers that differ in all rows"
        yield f"{name}: {said}; {pasted('data.exclude', ids)} leaves them out"
    for each, cells in numbers.items():
        if code := _code(cells):
            yield f"{name}: {code[1]} cells of {each!r} are {code[0]}, far from the others; data.missing=[{code[0]}]?"
    values, y = dataset.values or range(dataset.num_classes), dataset.y
    if y.ndim == 1 and isinstance(values[0], str):
        counts = dict(zip(map(str, values), np.bincount(y, minlength=len(values)).tolist(), strict=True))
        if len(counts) <= FEW and (why := _no_category(counts)):
            yield f"{name}: the label {why}, and each value is a class"
    elif code := _code(np.array(values)[y] if y.ndim == 1 else y.ravel()):
        yield f"{name}: {code[1]} labels are {code[0]}, far from the others; data.missing=[{code[0]}]?"
    if codes := [column for column in columns if column.code]:
        said = ", ".join(f"{column.code} of {column.name!r}" for column in codes)
        remedy = pasted("data.categorical", [column.name for column in codes])
        yield f"{name}: cells such as {said} are numbers, without the zero before them; {remedy} makes them categories"
    named = {"clients": dataset.client_names, "labels": dataset.values or (), **{c.name: c.counts for c in columns}}
    if alike := [f"{some(found)} ({which})" for which, names in named.items() if (found := _alike(names))]:
        yield f"{name}: different names, although only their case differs: {'; '.join(alike)}"
    new = [f"{c.name} {', '.join(sorted(values)[:3])}" for c in columns if (values := _only_tested(c, dataset))]
    if new:
        yield f"{name}: categories that no row of data.path has: {'; '.join(new)}"
    if dataset.task == "classification" and (same := [c.name for c in columns if _determines(c, dataset.y)]):
        yield f"{name}: each value of {', '.join(same)} has a single label; check that it is known before the label"


def _alike(names: Iterable[object]) -> list[str]:
    """Return the names that differ from others in case only."""
    texts = [*map(str, names)]
    counts = Counter(map(str.casefold, texts))
    return sorted((text for text in texts if counts[text.casefold()] > 1), key=str.casefold)


def _only_tested(column: Column, dataset: Dataset) -> set[str]:
    """Return the texts that only rows of the official test part have."""
    parts = np.split(column.cells.to_numpy(), [dataset.train_size]) if column.counts else ([], [])
    return {text for text in {*parts[1]} - {*parts[0]} if isinstance(text, str)}


def _numbers_rows(cells: np.ndarray) -> bool:
    return len(cells) > FEW and bool((cells == np.rint(cells)).all()) and len(np.unique(cells)) == len(cells)


def _code(cells: np.ndarray) -> tuple[int, int] | None:
    """Return a number of `CODES` at an end of a column, farther from the others than their range, and its count."""
    for end in (cells.min(initial=0), cells.max(initial=0)):
        others = cells[cells != end]
        count = len(cells) - len(others)
        if end in CODES and count > 1 and len(others) and np.abs(others - end).min() > np.ptp(others):
            return int(end), count
    return None


def _determines(column: Column, y: np.ndarray) -> bool:
    """Return whether each value has one label, with at least `ROWS_A_VALUE` rows a value."""
    from pandas import factorize

    if len(column.cells) > SAMPLE and column.cells.head(SAMPLE).is_unique:
        return False  # it has many more values, which would take long to count
    codes, values = factorize(column.cells)
    known = codes >= 0
    if not 1 < len(values) <= known.sum() / ROWS_A_VALUE:
        return False
    labels = y[known].astype(np.int64)
    return len(np.unique(labels)) > 1 and len(np.unique(codes[known] * (labels.max() + 1) + labels)) == len(values)


def card_of(source: Source, rows: Rows, inputs: Sequence[Column], text: tuple[str, str] | None = None) -> Card:
    """Return the card of a table with these inputs, or with a column of texts: its name, and what they are."""
    own = {source.label: "label", source.client: "client", source.group: "group"} | ({text[0]: "text"} if text else {})
    used = {column.name: column for column in inputs}
    unused = [str(name) for name in rows.frame.columns if name not in own and name not in used]
    lines = [*_about_rows(source, rows), *([(f"texts ({text[0]})", text[1])] if text else _about_inputs(inputs))]
    lines += [("not used", ", ".join(unused))] if unused else []
    return Card(tuple(lines), tuple(_record(name, own, used.get(name)) for name in rows.frame.columns))


def _about_rows(source: Source, rows: Rows) -> Iterator[tuple[str, str]]:
    data, test = rows.targets, len(rows.targets.y) - rows.targets.train_size
    yield "rows", f"{data.train_size:,} in {data.name}" + f", {test:,} for tests" * (test > 0)
    if lost := [f"{count:,} {why}" for why, count in rows.lost.items() if count]:
        yield "left out", ", ".join(lost)
    if data.clients is not None:
        sizes = np.bincount(data.clients, minlength=len(data.client_names))
        ends = [f"{data.client_names[i]} {sizes[i]:,}" for i in (sizes.argmin(), sizes.argmax())]
        said = f"smallest {ends[0]}, largest {ends[1]} rows" if np.ptp(sizes) else f"each {sizes[0]:,} rows"
        yield f"clients ({source.client})", f"{len(sizes)}; {said}"
    if data.groups is not None:
        yield f"groups ({source.group})", f"{len(np.unique(data.groups)):,}"
    yield f"label ({source.label})", about_targets(data)


def _about_inputs(inputs: Sequence[Column]) -> Iterator[tuple[str, str]]:
    numbers = [column.name for column in inputs if column.is_number]
    categories = [f"{column.name} {len(column.counts)}" for column in inputs if not column.is_number]
    for kind, names in {"numbers": numbers, "categories": categories}.items():
        yield kind, f"{len(names)}: {', '.join(names)}" if names else "none"
    most = sorted(inputs, key=lambda column: -column.missing)  # a line can have no room for all
    if gaps := [f"{column.name} {column.missing:,}" for column in most if column.missing]:
        yield "missing cells", f"{', '.join(gaps)}: filled with the mean or the most frequent value"


def _record(name: str, own: Mapping[str | None, str], column: Column | None) -> dict[str, Any]:
    """Return what data_card.json says about a column."""
    if column is None:
        return {"name": name, "kind": own.get(name, "not used")}
    if not column.is_number:
        return {"name": name, "kind": "category", "missing": column.missing, "values": column.counts}
    cells = column.cells.dropna().to_numpy(np.float64)
    about = {"min": cells.min(), "max": cells.max(), "mean": cells.mean()} if len(cells) else {}
    return {"name": name, "kind": "number", "missing": column.missing, **about}
