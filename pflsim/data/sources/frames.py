"""Rows of files and pandas frames with a target and a client: what tables and texts share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pflsim.config.components import NOTEBOOK, kept_object
from pflsim.config.names import nearest
from pflsim.data.dataset import Dataset
from pflsim.data.sources.cells import JSON, check_names, counts_rows, read_frame
from pflsim.data.sources.common import entries
from pflsim.data.sources.identifiers import label_cells, named_cells, numbered, targets_of
from pflsim.errors import SettingsError, reading

if TYPE_CHECKING:
    from pandas import DataFrame

TYPED = (*JSON, ".parquet", ".pq")
FORM = "a CSV file in UTF-8 with a header, lines of JSON (.jsonl), or a Parquet file (pip install 'pflsim[parquet]')"


class Source(NamedTuple):
    """The settings that tables and texts share.

    Args:
        path: the file, or the name of a frame in this process.
        test: that of the test rows.
        label: column of the targets.
        client: column of the clients.
        group: column of the groups whose rows stay together.
        missing: words that are missing values, in lower case; None: undecided.
        min_examples: clients with fewer rows in `path` are left out.
        lines: column of texts of which each line is a row; None: there is none.
    """

    path: str | None
    test: str | None
    label: str | None
    client: str | None
    group: str | None
    missing: tuple[str, ...] | None
    min_examples: int
    lines: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Source:
        """Return the source of the arguments of a loader."""
        found = given["missing"]
        words = None if found is None else tuple("null" if word is None else str(word).lower() for word in found)
        return cls(*({"lines": None, **given, "missing": words}[name] for name in cls._fields))


@dataclass(frozen=True)
class Rows:
    """The rows that are used, the training part first, and their data set, which has no inputs yet.

    Args:
        frame: the rows.
        targets: the data set.
        declared: columns that are text by their type, not by their content.
        aside: columns that are empty, count the rows, or are the index of a frame; inputs only if they are named.
        lost: the number of rows that are left out, by reason.
    """

    frame: DataFrame
    targets: Dataset
    declared: frozenset[str]
    aside: frozenset[str]
    lost: dict[str, Any]

    def dataset(self, content: DataFrame, dtype: Any, fit: Callable[[Dataset, Any], Any]) -> Dataset:
        """Return the data set whose inputs are made after the partition.

        Args:
            content: what identifies the examples.
            dtype: of the inputs.
            fit: makes the inputs, see `Dataset`.
        """
        from pandas import util

        hashes: Any = util.hash_pandas_object
        hashed = hashes(content, index=False).to_numpy()[:, None]
        return replace(self.targets, x=np.zeros((len(content), 1), dtype), content=hashed, fit=fit)


def read_rows(data: str, source: Source, columns: Sequence[str] | None, texts: Sequence[str] = ()) -> Rows:
    """Return rows that have a label, and a client and a group if there are columns of them.

    Those of the last files are kept, because a run asks for them twice.

    Args:
        data: the component, for messages.
        source: files and columns.
        columns: of the inputs, which both files have; None: all of `source.path`.
        texts: columns whose cells stay as they are written, besides those of the label, the clients and the groups.

    Raises:
        SettingsError: a file cannot be read, a column is missing, or no rows are left.
    """
    if not source.path or not source.label:
        missing = "data.label=COLUMN" if source.path else "data.path=FILE.csv (or .parquet)"
        raise SettingsError(f"data={data} needs {missing}")
    stamps, frames = [], False
    for key, name in {"data.path": source.path, "data.test": source.test}.items():
        if name:
            with reading(given_as(key, name), FORM):
                frames |= kept_object(name, key) is not None or Path(name).is_dir()
                stamps += [] if frames else [Path(name).stat().st_mtime_ns, Path(name).stat().st_size]
    read = _read.__wrapped__ if frames else _read  # a frame or folder can have changed
    return read(source, None if columns is None else tuple(columns), tuple(texts), tuple(stamps))


@lru_cache(maxsize=1)
def _read(source: Source, columns: tuple[str, ...] | None, texts: tuple[str, ...], stamps: tuple[int, ...]) -> Rows:
    from pandas import concat

    del stamps  # of the files, so that changed ones are read again
    own = {key: name for key in ("label", "client", "group") if (name := getattr(source, key))}
    files = {"data.path": str(source.path)} | ({"data.test": source.test} if source.test else {})
    read = [_frame(name, key, (*own.values(), *texts), source.lines) for key, name in files.items()]
    wanted = [*own.values(), *(read[0][0].columns if columns is None else columns)]
    for (part, _, _), (key, name) in zip(read, files.items(), strict=True):
        check_columns(given_as(key, name), part, wanted)
    frames, declared, aside = zip(*read, strict=True)
    frame: Any = concat(frames, ignore_index=True)[[*frames[0].columns]]
    typed = frozenset().union(*declared)
    where, name = given_as("data.path", source.path), Path(files["data.path"].removeprefix(NOTEBOOK)).stem
    training, lost = np.arange(len(frame)) < len(frames[0]), dict[str, Any]()
    with reading(where, FORM):
        labels = label_cells(frame[source.label], source.missing, source.label in typed)
        keep = labels.notna().to_numpy(bool)
        lost["without a label"] = np.count_nonzero(~keep)
        codes, names, notes = dict[str, np.ndarray](), dict[str, tuple[str, ...]](), list[str]()
        for key in [key for key in own if key != "label"]:
            codes[key], names[key] = numbered(named_cells(frame[own[key]], f"data.{key}", source.missing))
            lost[f"without a {key}"] = np.count_nonzero(keep & (codes[key] < 0))
            keep = keep & (codes[key] >= 0)
    notes += [f"{name}: {count} rows {why} are left out" for why, count in lost.items() if count]
    if source.client:
        found = names["client"]
        sizes = np.bincount(codes["client"][keep & training], minlength=len(found))
        if few := [f"{found[code]} ({sizes[code]})" for code in np.flatnonzero(sizes < source.min_examples)]:
            said = f"clients with fewer than data.min_examples={source.min_examples} rows are left out"
            notes.append(f"{name}: {len(few)} {said}: {', '.join(few)}")
        large = np.flatnonzero(sizes >= source.min_examples)
        places = np.full(len(found) + 1, -1)
        places[large] = np.arange(len(large))
        codes["client"], names["client"] = places[codes["client"]], tuple(found[code] for code in large)
        lost["of small clients"] = np.count_nonzero(keep & (codes["client"] < 0))
        keep = keep & (codes["client"] >= 0)
    if not keep[training].any():
        raise SettingsError(f"{where}: no rows are left; {'; '.join(notes) or 'it is empty'}")
    y, classes, values = targets_of(name, labels[keep], bool(lost["without a label"]))
    clients, groups = (codes[key][keep] if key in codes else None for key in ("client", "group"))
    targets = Dataset(
        name, np.empty((len(y), 0), np.float32), y, classes, int(keep[training].sum()), clients,
        names.get("client", ()), groups=groups, values=values, notes=tuple(notes),
        rows=None if keep.all() else np.flatnonzero(keep),
    )  # fmt: skip
    return Rows(frame.loc[keep], targets, typed, frozenset(aside[0]), lost)


def _frame(path: str, key: str, texts: Collection[str], lines: str | None) -> tuple[DataFrame, set[str], set[str]]:
    """Return a file, a folder of texts or a frame of this process, with names of columns as text.

    Args:
        path: of the file or folder, or the name of the frame.
        key: of the setting, for messages.
        texts: columns whose cells stay as they are written.
        lines: column whose lines, those of white space aside, become rows; None: rows stay as they are.

    Returns:
        The frame, the columns that are text by their type, and those that are empty, count the rows or are an index.
    """
    from pandas import DataFrame

    with reading(given_as(key, path), FORM):
        frame = kept_object(path, key)
        if frame is None and Path(path).is_dir():
            files = [file for folder in entries(Path(path)) if folder.is_dir() for file in entries(folder)]
            found = [(file.parent.name, _text(file)) for file in files]
            return _by_line(DataFrame(found, columns=["label", "text"]), lines), {"label", "text"}, set()
        untyped = frame is None and Path(path).suffix.lower() not in TYPED
        frame = read_frame(path, texts) if frame is None else frame
        if frame.columns.nlevels > 1:
            raise ValueError("its columns have names of several levels; give each one name")
        index = {str(name) for name in frame.index.names if name is not None}
        frame = (frame.reset_index([*filter(None, frame.index.names)]) if index else frame).rename(columns=str)
        check_names([*frame.columns])
        declared = set() if untyped else {name for name in frame.columns if _is_text(frame[name])}
        empty = {name for name in frame.columns if bool(frame[name].isna().all())}
        frame = _by_line(frame, lines)
        return frame, declared, index | empty | {name for name in frame.columns if counts_rows(frame[name])}


def _by_line(frame: Any, column: str | None) -> Any:
    if column is None or column not in frame.columns:
        return frame
    lines = frame[column].map(lambda text: str(text).splitlines(), na_action="ignore")
    frame = frame.assign(**{column: lines}).explode(column, ignore_index=True)
    return frame[frame[column].notna() & (frame[column].astype(str).str.strip() != "")]


def _text(file: Path) -> str:
    if file.is_dir():
        raise ValueError(f"{file} is a folder; texts are files CLASS/*")
    with reading(file, "a text in UTF-8"):
        return file.read_text(encoding="utf-8")


def _is_text(column: Any) -> bool:
    """Return whether all cells of a typed column are text, or it is categorical."""
    return (
        column.dtype.name == "category"
        or column.dtype.kind == "O"
        and all(isinstance(value, str) for value in column.dropna())
    )


def given_as(key: str, path: str | None) -> str:
    """Return `key=path` for a message, or a name for a frame of this process."""
    frame = "data=Table" if key == "data.path" else "data=Table(test=...)"
    return frame if path and path.startswith(NOTEBOOK) else f"{key}={path}"


def defaults_of(
    load: partial[Dataset], model: str, targets: Callable[[Source, dict[str, Any]], Dataset]
) -> dict[str, Any]:
    """Return the settings of a run that data choose unless they are given, by key.

    Args:
        load: the loader with its settings.
        model: the name of their model.
        targets: reads the data set of a source with these settings; only its clients count.
    """
    given = {name: parameter.default for name, parameter in signature(load).parameters.items()}
    source = Source.of(given)
    chosen = {"model": model} | ({} if source.test else {"split": "merged"})
    if not source.client:
        return chosen
    more = {"split.test_by": "clients"} if source.test else {}
    return {**chosen, **more, "partition": "by_client", "clients": len(targets(source, given).client_names)}


def check_columns(where: str, frame: DataFrame, wanted: Sequence[str]) -> None:
    """Raise a `SettingsError` if columns are missing."""
    if lacking := [name for name in wanted if name not in frame.columns]:
        named = ", ".join(map(repr, lacking))
        raise SettingsError(f"{where} has no column {named}; {nearest(lacking[0], map(str, frame.columns))}")
