"""Tables of numbers and categories: CSV and Parquet files, and pandas frames, with or without a client for each row."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from pflsim.config.components import NOTEBOOK, keep_object, kept_object
from pflsim.config.names import nearest
from pflsim.config.settings import Count
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.data.targets import found_targets
from pflsim.errors import SettingsError, reading

if TYPE_CHECKING:
    from pandas import DataFrame

ODD = "cMm"
"""Kinds of columns that are neither numbers nor categories: complex numbers, dates and durations."""
FORM = "a CSV file with a header, or a Parquet file (pip install 'pflsim[parquet]')"


@dataclass(frozen=True)
class Table:
    """A table for `data=`, see `load` for its settings.

    Args:
        frame: a pandas frame, or a CSV or Parquet file.
        test: a frame or file of test rows, with the same columns; None: `split` draws them.
        label, client, features, categorical, fit, min_examples: see `load`.
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
        """Return the settings of `load`; frames are kept in this process under a name."""
        given = {field.name: getattr(self, field.name) for field in fields(self)[2:-1]}
        for key, part, name in (("path", self.frame, self.name), ("test", self.test, f"{self.name}_test")):
            is_file = part is None or isinstance(part, str | Path)
            given[key] = part if is_file else keep_object(name, part)
        return {key: value for key, value in given.items() if value is not None}


@dataclass(frozen=True)
class Encoder:
    """Maps rows of a table to inputs by scikit-learn: numbers standardised, categories one-hot, missing values filled.

    Args:
        numbers, categories: names of the columns.
        fitted: a `ColumnTransformer` fitted on all clients; after it, if each has its own, those of the clients.
    """

    numbers: list[str]
    categories: list[str]
    fitted: Sequence[Any] = ()

    def columns(self, frame: DataFrame) -> DataFrame:
        """Return the columns as float64 or text; missing values are NaN.

        Raises:
            SettingsError: a column is missing, or has text in place of numbers.
        """
        from pandas import DataFrame

        _check_columns("the table", frame, [*self.numbers, *self.categories])
        found: dict[str, Any] = {}
        for name in self.numbers:
            with reading(f"column {name!r}", "numbers"):
                found[name] = frame[name].to_numpy(dtype=np.float64, na_value=np.nan)
        for name in self.categories:
            found[name] = frame[name].map(_text, na_action="ignore").astype(object).where(frame[name].notna(), np.nan)
        return DataFrame(found, index=frame.index)

    def fit(self, rows: DataFrame, known: Any = "auto") -> Any:
        """Return a `ColumnTransformer` fitted on rows of `columns`, with these categories of each column."""
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import OneHotEncoder, StandardScaler

        means = SimpleImputer(keep_empty_features=True)
        modes = SimpleImputer(strategy="most_frequent", keep_empty_features=True)
        one_hot = OneHotEncoder(categories=known, handle_unknown="ignore", sparse_output=False)
        numbers = ("numbers", make_pipeline(means, StandardScaler()), self.numbers)
        return ColumnTransformer([numbers, ("categories", make_pipeline(modes, one_hot), self.categories)]).fit(rows)

    def __call__(self, frame: DataFrame, client: int | None = None) -> np.ndarray:
        """Return the inputs [n, features] float32 of rows, with a client's own transformer if it has one."""
        own = 0 if client is None or len(self.fitted) == 1 else 1 + client
        return np.asarray(self.fitted[own].transform(self.columns(frame)), np.float32)


@dataclass(frozen=True)
class Rows:
    """The rows of a table that are used, the training part first; see `Dataset`."""

    frame: DataFrame
    encoder: Encoder
    y: np.ndarray
    classes: int
    values: tuple[Any, ...] | None
    train_size: int
    clients: np.ndarray | None
    names: tuple[str, ...]
    notes: tuple[str, ...]


def load(
    *,
    path: str | None = None,
    test: str | None = None,
    label: str | None = None,
    client: str | None = None,
    features: list[str] | None = None,
    categorical: list[str] | None = None,
    fit: Literal["all", "client"] = "all",
    min_examples: Count = 8,
) -> Dataset:
    """Load a table from a CSV or Parquet file. Numbers are standardised, categories one-hot, missing values filled.

    Rows without a label are left out. By default, `model=tabular_mlp`; without `test`, `split=merged`; with `client`,
    `partition=by_client`, with a client for each value.

    Args:
        path: the file.
        test: a file of test rows, whose columns are matched by name; None: `split` draws them.
        label: column of the targets. Text, booleans and integers are classes, other numbers are values.
        client: column of the clients, such as hospitals or schools, whose values are their names.
        features: columns of the inputs; None: all others.
        categorical: columns of numbers that are categories; columns of text always are.
        fit: the training rows that give means, deviations and fillings: of all clients, or each client's own.
        min_examples: clients with fewer training rows are left out.

    Returns:
        x [n, features] float32, after the partition. The name is the file name without its ending.

    Raises:
        SettingsError: the file cannot be read, or a column is missing or is no number and no category.
    """
    rows = _rows(path, test, label, client, features, categorical, min_examples)

    def fitted(dataset: Dataset, partition: Partition) -> Dataset:
        encoder, whole = rows.encoder, np.unique(np.concatenate(partition.train))
        with reading(f"data.path={path}", "finite numbers"):
            every = encoder.fit(rows.frame.iloc[whole])
            x = np.asarray(every.transform(rows.frame), np.float32)
            used = [every]
            if fit == "client":
                known = every.named_transformers_["categories"][-1].categories_ if encoder.categories else "auto"
                for parts in zip(partition.train, partition.val, partition.test, strict=True):
                    own = np.concatenate(parts)
                    used.append(encoder.fit(rows.frame.iloc[parts[0]], known))
                    x[own] = used[-1].transform(rows.frame.iloc[own])
        return replace(dataset, x=x, fit=None, encoder=_dumped(replace(encoder, fitted=used)))

    from pandas import util

    hashes: Any = util.hash_pandas_object
    content = hashes(rows.frame, index=False).to_numpy()[:, None]
    x = np.zeros((len(content), 1), np.float32)
    about: dict[str, Any] = {
        "values": rows.values,
        "clients": rows.clients,
        "client_names": rows.names,
        "notes": rows.notes,
    }
    return Dataset(_name(path), x, rows.y, rows.classes, rows.train_size, **about, content=content, fit=fitted)


def defaults(load: partial[Dataset]) -> dict[str, Any]:
    """Return the settings of a run that a table chooses unless they are given, by key; `load` has its settings."""
    given = {key: value for key, value in load.keywords.items() if key != "fit"}
    test, client = given.get("test"), given.get("client")
    chosen = {"model": "tabular_mlp"} | ({} if test else {"split": "merged"})
    if not client:
        return chosen
    more = {"split.test_by": "clients"} if test else {}
    return {**chosen, **more, "partition": "by_client", "clients": len(_rows(**cast(Any, given)).names)}


def _rows(
    path: str | None,
    test: str | None = None,
    label: str | None = None,
    client: str | None = None,
    features: Sequence[str] | None = None,
    categorical: Sequence[str] | None = None,
    min_examples: int = 8,
) -> Rows:
    """Return the rows of a table; those of the last call are kept, because a run asks for them twice."""
    if not path or not label:
        raise SettingsError(f"data=table needs {'data.label=COLUMN' if path else 'data.path=FILE.csv (or .parquet)'}")
    stamps = []
    for key, name in {"data.path": path, "data.test": test}.items():
        if name:
            with reading(f"{key}={name}", FORM):
                kept = kept_object(name, key)
                stamps.append(Path(name).stat().st_mtime_ns if kept is None else id(kept))
    lists = (None if each is None else tuple(each) for each in (features, categorical))
    return _read(path, test, label, client, *lists, min_examples, tuple(stamps))


@lru_cache(maxsize=1)
def _read(
    path: str,
    test: str | None,
    label: str,
    client: str | None,
    features: tuple[str, ...] | None,
    categorical: tuple[str, ...] | None,
    min_examples: int,
    stamps: tuple[int, ...],
) -> Rows:
    from pandas import concat, factorize

    del stamps  # of the files and frames, so that changed ones are read again
    parts = [_frame(path, "data.path"), *([_frame(test, "data.test")] if test else [])]
    others = [name for name in parts[0].columns if name not in (label, client)]
    used = others if features is None else list(features)
    wanted = [label, *filter(None, [client]), *used, *(categorical or ())]
    for part, name in zip(parts, (f"data.path={path}", f"data.test={test}"), strict=False):
        _check_columns(name, part, wanted)
    if not {*used} <= {*others} or not used:
        raise SettingsError(f"data.features={list(used)}: expected columns other than data.label and data.client")
    frame, name, notes = concat(parts, ignore_index=True), _name(path), list[str]()
    if odd := [column for column in used if frame[column].dtype.kind in ODD]:
        raise SettingsError(f"data.path={path}: column {odd[0]!r} is {frame[odd[0]].dtype}; make it numbers or text")
    categories = [c for c in used if c in (categorical or ()) or frame[c].dtype.kind not in "iufb"]
    encoder = Encoder([c for c in used if c not in categories], categories)
    keep, training = frame[label].notna().to_numpy(), np.arange(len(frame)) < len(parts[0])
    if unlabelled := np.count_nonzero(~keep):
        notes.append(f"{name}: {unlabelled} rows without a label are left out")
    clients, names = None, ()
    if client:
        codes, values = factorize(frame[client], sort=True)  # -1: missing
        if lost := np.count_nonzero(codes < 0):
            notes.append(f"{name}: {lost} rows without a client are left out")
        sizes = np.bincount(codes[keep & training & (codes >= 0)], minlength=len(values))
        if few := [f"{_text(values[code])} ({sizes[code]})" for code in np.flatnonzero(sizes < min_examples)]:
            said = f"clients with fewer than data.min_examples={min_examples} training rows are left out"
            notes.append(f"{name}: {len(few)} {said}: {', '.join(few)}")
        large = np.flatnonzero(sizes >= min_examples)
        places = np.full(len(values) + 1, -1)
        places[large] = np.arange(len(large))
        clients, names = places[codes], tuple(_text(values[code]) for code in large)
        keep = keep & (clients >= 0)
        clients = clients[keep]
    if not keep[training].any():
        raise SettingsError(f"data.path={path}: no rows are left; {'; '.join(notes) or 'the table is empty'}")
    y = np.asarray(frame[label][keep].tolist())
    if unlabelled and y.dtype.kind == "f" and (y == np.rint(y)).all():  # integers, before some were missing
        y = y.astype(np.int64)
    y, classes, found, about = found_targets(name, y)
    rows = encoder.columns(frame.loc[keep])
    return Rows(rows, encoder, y, classes, found, int(keep[training].sum()), clients, names, (*notes, *about))


def _frame(path: str, key: str) -> DataFrame:
    """Return a file or a frame of this process, with names of columns as text."""
    from pandas import read_csv, read_parquet

    with reading(f"{key}={path}", FORM):
        frame = kept_object(path, key)
        if frame is None:
            frame = (read_parquet if Path(path).suffix in (".parquet", ".pq") else read_csv)(path)
        return frame.rename(columns=str)


def _name(path: str | None) -> str:
    return Path(str(path).removeprefix(NOTEBOOK)).stem


def _check_columns(where: str, frame: DataFrame, wanted: Sequence[str]) -> None:
    if lacking := [name for name in wanted if name not in frame.columns]:
        raise SettingsError(f"{where} has no column {lacking[0]!r}; {nearest(lacking[0], map(str, frame.columns))}")


def _text(value: Any) -> str:
    """Return a category or client as text; 3.0 is 3, which pandas makes of a column with missing values."""
    return " ".join(str(int(value) if isinstance(value, float) and value.is_integer() else value).split())


def _dumped(encoder: Encoder) -> bytes:
    import joblib

    file = io.BytesIO()
    joblib.dump(encoder, file)
    return file.getvalue()
