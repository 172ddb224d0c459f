"""Rows of files and pandas frames with a target and a client: what tables and texts share."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pflsim.config.components import NOTEBOOK, keep_object, kept_object
from pflsim.config.names import nearest
from pflsim.data.dataset import Dataset
from pflsim.data.targets import found_targets
from pflsim.errors import SettingsError, reading

if TYPE_CHECKING:
    from pandas import DataFrame

FORM = "a CSV file in UTF-8 with a header, lines of JSON (.jsonl), or a Parquet file (pip install 'pflsim[parquet]')"


@dataclass(frozen=True)
class Table:
    """A table for `data=`, see `pflsim.data.sources.table.load` for its settings.

    Args:
        frame: a pandas frame, or a CSV, JSON-lines or Parquet file.
        test: a frame or file of test rows, with the same columns; None: `split` draws them.
        label, client, features, categorical, fit, min_examples: settings.
        name: in records.
    """

    frame: Any
    test: Any = None
    label: str | None = None
    client: str | None = None
    features: list[str] | None = None
    categorical: list[str] | None = None
    fit: str | None = None
    min_examples: int | None = None
    name: str = "table"

    def settings(self) -> dict[str, Any]:
        """Return the settings of `data=table`; frames are kept in this process under a name."""
        given = {field.name: getattr(self, field.name) for field in fields(self)[2:-1]}
        for key, part, name in (("path", self.frame, self.name), ("test", self.test, f"{self.name}_test")):
            is_file = part is None or isinstance(part, str | Path)
            given[key] = part if is_file else keep_object(name, part)
        return {key: value for key, value in given.items() if value is not None}


class Source(NamedTuple):
    """The settings that tables and texts share.

    Args:
        path: the file, or the name of a frame in this process.
        test: that of the test rows.
        label: column of the targets.
        client: column of the clients.
        min_examples: clients with fewer training rows are left out.
    """

    path: str | None
    test: str | None
    label: str | None
    client: str | None
    min_examples: int


@dataclass(frozen=True)
class Rows:
    """The rows that are used, the training part first, and their data set, which has no inputs yet."""

    frame: DataFrame
    targets: Dataset

    def dataset(self, content: DataFrame, dtype: Any, fit: Callable[[Dataset, Any], Dataset]) -> Dataset:
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


def read_rows(data: str, source: Source, columns: Sequence[str] | None) -> Rows:
    """Return rows that have a label, and a client if there is a column of clients.

    Those of the last call are kept, because a run asks for them twice.

    Args:
        data: the component, for messages.
        source: files and columns.
        columns: of the inputs, which both files have; None: all of `source.path`.

    Raises:
        SettingsError: a file cannot be read, a column is missing, or no rows are left.
    """
    if not source.path or not source.label:
        missing = "data.label=COLUMN" if source.path else "data.path=FILE.csv (or .parquet)"
        raise SettingsError(f"data={data} needs {missing}")
    stamps = []
    for key, name in {"data.path": source.path, "data.test": source.test}.items():
        if name:
            with reading(given_as(key, name), FORM):
                kept = kept_object(name, key)
                stamps.append(Path(name).stat().st_mtime_ns if kept is None else id(kept))
    return _read(source, None if columns is None else tuple(columns), tuple(stamps))


@lru_cache(maxsize=1)
def _read(source: Source, columns: tuple[str, ...] | None, stamps: tuple[int, ...]) -> Rows:
    from pandas import concat, factorize

    del stamps  # of the files and frames, so that changed ones are read again
    path, test, label, client, min_examples = source
    assert path and label
    parts = [_frame(path, "data.path"), *([_frame(test, "data.test")] if test else [])]
    wanted = [label, *([client] if client else []), *(parts[0].columns if columns is None else columns)]
    for part, where in zip(parts, (given_as("data.path", path), given_as("data.test", test)), strict=False):
        check_columns(where, part, wanted)
    frame: Any = concat(parts, ignore_index=True)[[*parts[0].columns]]
    name, notes = Path(path.removeprefix(NOTEBOOK)).stem, list[str]()
    keep, training = frame[label].notna().to_numpy(), np.arange(len(frame)) < len(parts[0])
    if unlabelled := np.count_nonzero(~keep):
        notes.append(f"{name}: {unlabelled} rows without a label are left out")
    clients, names = None, ()
    if client:
        codes, values = factorize(frame[client], sort=True)  # -1: missing
        same, values = factorize(np.array([*map(as_text, values)], object))  # 1 and "1" are one client
        codes = np.append(same, -1)[codes]
        if lost := np.count_nonzero(codes < 0):
            notes.append(f"{name}: {lost} rows without a client are left out")
        sizes = np.bincount(codes[keep & training & (codes >= 0)], minlength=len(values))
        if few := [f"{values[code]} ({sizes[code]})" for code in np.flatnonzero(sizes < min_examples)]:
            said = f"clients with fewer than data.min_examples={min_examples} training rows are left out"
            notes.append(f"{name}: {len(few)} {said}: {', '.join(few)}")
        large = np.flatnonzero(sizes >= min_examples)
        places = np.full(len(values) + 1, -1)
        places[large] = np.arange(len(large))
        clients, names = places[codes], tuple(values[code] for code in large)
        keep = keep & (clients >= 0)
        clients = clients[keep]
    if not keep[training].any():
        raise SettingsError(f"{given_as('data.path', path)}: no rows are left; {'; '.join(notes) or 'it is empty'}")
    y = np.asarray(frame[label][keep].tolist())
    if unlabelled and y.dtype.kind == "f" and (y == np.rint(y)).all():  # integers, before some were missing
        y = y.astype(np.int64)
    y, classes, values = found_targets(name, y)
    more = {"clients": clients, "client_names": names, "values": values, "notes": tuple(notes)}
    none = np.empty((len(y), 0), np.float32)
    return Rows(frame.loc[keep], Dataset(name, none, y, classes, int(keep[training].sum()), **more))


def _frame(path: str, key: str) -> DataFrame:
    """Return a file, a folder of texts or a frame of this process, with names of columns as text."""
    from pandas import DataFrame, read_csv, read_json, read_parquet

    with reading(given_as(key, path), FORM):
        frame, suffix = kept_object(path, key), Path(path).suffix
        if frame is None and Path(path).is_dir():
            files = sorted(file for file in Path(path).glob("*/*") if file.is_file() and file.name[0] != ".")
            texts = [(file.parent.name, file.read_text(encoding="utf-8")) for file in files]
            return DataFrame(texts, columns=["label", "text"])
        if frame is None and suffix in (".jsonl", ".ndjson"):
            frame = read_json(path, lines=True)
        elif frame is None:
            frame = (read_parquet if suffix in (".parquet", ".pq") else read_csv)(path)
        frame = frame.rename(columns=str)
        if repeated := [*frame.columns[frame.columns.duplicated()]]:
            raise ValueError(f"two columns have the name {repeated[0]!r}")
        return frame


def given_as(key: str, path: str | None) -> str:
    """Return `key=path` for a message, or a name for a frame of this process."""
    frame = "data=Table" if key == "data.path" else "data=Table(test=...)"
    return frame if path and path.startswith(NOTEBOOK) else f"{key}={path}"


def defaults_of(load: partial[Dataset], model: str, rows: Callable[[Source, dict[str, Any]], Rows]) -> dict[str, Any]:
    """Return the settings of a run that data choose unless they are given, by key.

    Args:
        load: the loader with its settings.
        model: the name of their model.
        rows: reads the rows of a source with these settings; only their clients count.
    """
    given = {name: parameter.default for name, parameter in signature(load).parameters.items()}
    source = Source(*(given[name] for name in Source._fields))
    chosen = {"model": model} | ({} if source.test else {"split": "merged"})
    if not source.client:
        return chosen
    more = {"split.test_by": "clients"} if source.test else {}
    return {**chosen, **more, "partition": "by_client", "clients": len(rows(source, given).targets.client_names)}


def check_columns(where: str, frame: DataFrame, wanted: Sequence[str]) -> None:
    """Raise a `SettingsError` if a column is missing."""
    if lacking := [name for name in wanted if name not in frame.columns]:
        raise SettingsError(f"{where} has no column {lacking[0]!r}; {nearest(lacking[0], map(str, frame.columns))}")


def as_text(value: Any) -> str:
    """Return a category or client as text; 3.0 is 3, which pandas makes of a column with missing values."""
    return " ".join(str(int(value) if isinstance(value, float) and value.is_integer() else value).split())


def dumped(encoder: Any) -> bytes:
    """Return an encoder pickled by joblib."""
    import joblib

    file = io.BytesIO()
    joblib.dump(encoder, file)
    return file.getvalue()
