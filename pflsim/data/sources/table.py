"""Tables of numbers and categories: CSV and Parquet files, and pandas frames, with or without a client for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pflsim.config.settings import Count
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.data.sources.frames import Rows, Source, as_text, check_columns, defaults_of, dumped, given_as, read_rows
from pflsim.errors import SettingsError, reading

if TYPE_CHECKING:
    from pandas import DataFrame

ODD = "cMm"
"""Kinds of columns that are neither numbers nor categories: complex numbers, dates and durations."""
MANY = 20
"""A column with more categories than this, and than half of the rows, probably has numbers or names."""


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

        check_columns("the table", frame, [*self.numbers, *self.categories])
        found: dict[str, Any] = {}
        for name in self.numbers:
            with reading(f"column {name!r}", "numbers"):
                found[name] = frame[name].to_numpy(dtype=np.float64, na_value=np.nan)
                if np.isinf(found[name]).any():
                    raise ValueError("infinite values; mark missing ones as such")
        for name in self.categories:
            found[name] = frame[name].map(as_text, na_action="ignore").astype(object).where(frame[name].notna(), np.nan)
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
    """Load CSV, JSON lines or Parquet. Numbers are standardised, categories one-hot, missing values filled.

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
    rows, encoder = _read(Source(path, test, label, client, min_examples), features, categorical)

    def fitted(dataset: Dataset, partition: Partition) -> Dataset:
        columns, whole = encoder.columns(rows.frame), np.unique(np.concatenate(partition.train))
        with reading(given_as("data.path", path), "finite numbers"):
            every = encoder.fit(columns.iloc[whole])
            x = np.asarray(every.transform(columns), np.float32)
            used = [every]
            if fit == "client":
                known = every.named_transformers_["categories"][-1].categories_ if encoder.categories else "auto"
                for parts in zip(partition.train, partition.val, partition.test, strict=True):
                    own = np.concatenate(parts)
                    used.append(encoder.fit(columns.iloc[parts[0]], known))
                    x[own] = used[-1].transform(columns.iloc[own])
        return replace(dataset, x=x, encoder=dumped(replace(encoder, fitted=used)))

    content, notes = encoder.columns(rows.frame), rows.targets.notes
    for name in encoder.categories:
        if (count := len({*content[name]})) > max(MANY, len(content) / 2):
            of = f"{rows.targets.name}: column {name!r} is text with {count} different values in {len(content)} rows"
            notes += (f"{of}, each of them an input; make it numbers, or leave it out of data.features",)
    return replace(rows.dataset(content, np.float32, fit=fitted), notes=notes)


def defaults(load: partial[Dataset]) -> dict[str, Any]:
    """Return the settings of a run that a table chooses unless they are given, by key; `load` has its settings."""
    return defaults_of(load, "tabular_mlp", lambda source, its: _read(source, its["features"], its["categorical"])[0])


def _read(source: Source, features: Sequence[str] | None, categorical: Sequence[str] | None) -> tuple[Rows, Encoder]:
    """Return the rows of a table, and the encoder of its columns, not fitted."""
    categorical = categorical or []
    rows = read_rows("table", source, None if features is None else [*features, *categorical])
    frame, where = rows.frame, given_as("data.path", source.path)
    others = [name for name in frame.columns if name not in (source.label, source.client)]
    used = others if features is None else list(features)
    check_columns(where, frame, categorical)
    if not {*used} <= {*others} or not used:
        raise SettingsError(f"data.features={list(used)}: expected columns other than data.label and data.client")
    if odd := [column for column in used if frame[column].dtype.kind in ODD]:
        raise SettingsError(f"{where}: column {odd[0]!r} is {frame[odd[0]].dtype}; make it numbers or text")
    categories = [c for c in used if c in categorical or frame[c].dtype.kind not in "iufb"]
    return rows, Encoder([c for c in used if c not in categories], categories)
