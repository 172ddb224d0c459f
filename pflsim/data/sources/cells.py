"""Files of rows as frames, and their cells as numbers or text, with what is missing."""

from __future__ import annotations

import csv
import json
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pandas import DataFrame, Series

WORDS = frozenset(("na", "n/a", "nan", "null", "none", "#n/a", "\\n", "?", ".", "-"))
"""Words for a missing value among numbers, in lower case."""
TRUTH = {"true": 1.0, "false": 0.0}
JSON = (".jsonl", ".ndjson", ".json")
NUMBERS = "iufb"
"""Kinds of types of numbers."""
SAMPLE = 10_000
"""So many rows tell whether something occurs in a column."""
ZEROS = r"\s*0\d+\s*"
"""Digits after a zero, such as 007."""
EXACT = 2**53
"""From here on, whole numbers in floating point have lost digits."""


def read_frame(path: str, texts: Collection[str]) -> DataFrame:
    """Return the rows of a file: CSV, JSON lines (.jsonl, .ndjson, .json) or Parquet (.parquet, .pq).

    Args:
        path: the file.
        texts: columns whose cells stay as they are written.

    Raises:
        ValueError: a name is repeated, a header is missing, or numbers have decimal commas and points.
    """
    from pandas import DataFrame, read_parquet

    suffix = Path(path).suffix.lower()
    if suffix in (".parquet", ".pq"):
        return read_parquet(path, dtype_backend="numpy_nullable")
    if suffix not in JSON:
        return _read_csv(path, texts)
    with _opened(path) as file:
        records = [json.loads(line, object_pairs_hook=_unique) for line in file if line.strip()]
    if not all(isinstance(record, dict) for record in records):
        raise ValueError("its lines are no objects; write one object {...} in each line")
    frame = DataFrame(records, dtype=object)
    return frame.assign(**{name: frame[name].infer_objects() for name in frame.columns if name not in texts})


def _opened(path: str) -> Any:
    """Open a file of text for reading, which may be compressed."""
    import fsspec

    return fsspec.open(path, "rt", encoding="utf-8-sig", newline="", compression="infer")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    check_names([name for name, _ in pairs])
    return dict(pairs)


def check_names(names: Sequence[str]) -> None:
    """Raise a `ValueError` if two columns have one name."""
    if repeated := [name for number, name in enumerate(names) if name and name in names[:number]]:
        raise ValueError(f"two columns have the name {repeated[0]!r}")


def _read_csv(path: str, texts: Collection[str]) -> DataFrame:
    """Return the rows of a CSV file. The separator is the most frequent one of the header."""
    from pandas import read_csv

    with _opened(path) as file:
        lines = (line for line in file if line.strip())
        header = next(lines, "")
        separator = max(",;\t", key=re.sub(r'"[^"]*"', "", header).count)
        rows = csv.reader(chain([header], lines), delimiter=separator)
        names, first = next(rows, []), next(rows, [])
    check_names(names)
    numbers = [value for name in names if (value := as_number(name)) is not None]
    if any(later <= earlier for earlier, later in zip(numbers, numbers[1:], strict=False)):
        raise ValueError(f"its first line has numbers, not names of columns: {header.strip()[:60]}; add a header")
    if len(first) > len(names):
        said = f"its header is {header.strip()[:60]}, but the row below it has {len(first)} cells"
        raise ValueError(f"{said}; expected a name for each, in the first line")
    decimal = _decimal_mark(path) if separator == ";" else "."
    options: Any = {"sep": separator, "keep_default_na": False, "na_values": [""], "encoding": "utf-8-sig"}
    head: Any = read_csv(path, nrows=SAMPLE, dtype=object, **options)
    coded = [column for column in head.columns if head[column].str.fullmatch(ZEROS, na=False).any()]
    own: Any = dict.fromkeys([*texts, *coded], object)
    frame = read_csv(path, decimal=decimal, dtype=own, low_memory=False, **options)
    doubtful = [name for name in frame.columns if _like_thousands(frame[name])]
    raw = read_csv(path, usecols=doubtful, dtype=object, **options) if doubtful else frame
    for name in doubtful:
        marked = [text for text in raw[name].dropna() if not text.strip().isdecimal()]
        if all(re.fullmatch(r"[1-9]\d{0,2}[.,]\d{3}", text.strip()) for text in marked):
            said = f"{marked[0]} among whole numbers below 1000: are these thousands?"
            raise ValueError(f"column {name!r} has {said} Take their marks out, or write 12.000 for 12")
    for name in [name for name, kind in frame.dtypes.items() if kind.kind == "O" and decimal == ","]:
        is_number = frame[name].str.fullmatch(r" *[-+]?\d+(,\d+)?([eE][-+]?\d+)? *", na=False).astype(bool)
        if is_number.sum() * 2 >= frame[name].notna().sum():  # others can be words for missing values
            frame[name] = frame[name].where(~is_number, frame[name].str.replace(",", "."))
    return frame


def _like_thousands(column: Any) -> bool:
    """Return whether numbers could be 987 and 1.011 for 1011: below 1000, whole or with at most three decimals."""
    cells = column.dropna().to_numpy() if column.dtype.kind == "f" else np.empty(0)
    if not ((cells >= 0) & (cells < 1000)).all():
        return False
    whole, near = cells == np.rint(cells), np.abs(cells * 1000 - np.rint(cells * 1000)) < 1e-6
    return bool(near.all() and whole.any() and not whole.all())


def _decimal_mark(path: str) -> str:
    """Return the decimal mark of a file with semicolons: a comma if a cell without quotes has one between digits."""
    with _opened(path) as file:
        text = file.read()
    comma, point = (
        re.search(rf"(?:^|;) *([-+]?\d+{mark}\d+(?:[eE][-+]?\d+)?) *(?=[;\r]|$)", text, re.M) for mark in (",", r"\.")
    )
    if comma and point:
        raise ValueError(
            f"numbers have decimal commas ({comma[1]}) and points ({point[1]}); write all with one decimal mark, and "
            "without marks of thousands"
        )
    return "," if comma else "."


def as_number(text: str) -> float | None:
    """Return the finite number that a text is; None for other text."""
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def as_text(value: Any) -> str:
    """Return a value as text without outer and doubled blanks, in Unicode's form NFC; 3.0 is 3."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return unicodedata.normalize("NFC", " ".join(str(value).split()))


def names_of_cells(column: Series) -> Series:
    """Return the cells as text, as they are written but for blanks; missing ones, also empty ones, are NaN.

    If all are whole numbers, .0 at their end is removed: a missing cell can have turned integers into floating point.

    Raises:
        ValueError: whole numbers in floating point have lost digits.
    """
    from pandas import Series, factorize

    if column.dtype.kind == "f" and (column.abs() >= EXACT).any():
        raise ValueError(f"column {column.name!r} has numbers of 16 digits or more in floating point; make them text")
    codes, values = factorize(column)
    texts = [as_text(value) for value in values]
    if all(re.fullmatch(r"[-+]?\d+(\.0*)?", text) for text in texts if text):
        texts = [text.partition(".")[0] for text in texts]
    found = np.array([*(text or np.nan for text in texts), np.nan], object)
    return Series(found[codes], column.index, object, column.name)


def without(names: Series, words: Collection[str]) -> Series:
    """Return names of which these words, in upper or lower case, are NaN."""
    gone = [name for name in names.dropna().unique() if name.lower() in words] if words else []
    return names.where(~names.isin(gone)) if gone else names


def numbers_of_cells(column: Series, missing: Iterable[str] = ()) -> np.ndarray | None:
    """Return the cells as float64, missing ones as NaN; None if a cell is something else than a finite number.

    `WORDS` are missing; cells that are all true or false are 1 and 0.

    Args:
        column: of a frame.
        missing: further words in lower case, or numbers, that are missing.

    Raises:
        ValueError: a number is infinite.
    """
    from pandas import factorize

    gone = {*missing}
    if column.dtype.kind in NUMBERS:
        found = column.to_numpy(dtype=np.float64, na_value=np.nan)
        if np.isinf(found).any():
            raise ValueError(f"column {column.name!r} has infinite values; mark missing ones as such")
        lost = [number for word in gone if (number := as_number(word)) is not None]
        return np.where(np.isin(found, lost), np.nan, found) if lost else found
    codes, values = factorize(column)
    gone |= WORDS
    texts = ["" if (text := str(value).strip().lower()) in gone else text for value in values]
    read = TRUTH.get if {*texts} <= {"", *TRUTH} else as_number
    cells = [read(text) if text else math.nan for text in texts]
    return None if None in cells else np.array([*cells, math.nan], np.float64)[codes]


def counts_rows(column: Any) -> bool:
    """Return whether a column has the numbers 0, 1, ... or 1, 2, ... in this order."""
    if column.dtype.kind not in "iu" or not len(column) or column.hasnans:
        return False
    cells = column.to_numpy(np.int64)
    return cells[0] in (0, 1) and bool((np.diff(cells) == 1).all())
