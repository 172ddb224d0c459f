"""Tables of numbers and categories: CSV and Parquet files, and pandas frames, with or without a client for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pflsim.config.components import TARGET, bind, check_component, keep_object
from pflsim.config.settings import Count
from pflsim.data.dataset import Card, Dataset
from pflsim.data.federated import Partition
from pflsim.data.sources.cells import names_of_cells, numbers_of_cells, without
from pflsim.data.sources.columns import Column, card_of, check_inputs, columns_of, doubts
from pflsim.data.sources.frames import Rows, Source, check_columns, defaults_of, dumped, given_as, read_rows
from pflsim.errors import SettingsError, reading

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Table:
    """A table for `data=`, see `pflsim.data.sources.table.load` for its settings.

    Args:
        frame: a pandas frame, or a CSV, JSON-lines or Parquet file.
        test: a frame or file of test rows, with the same columns; None: `split` draws them.
        label, client, group, features, exclude, categorical, missing, fit, min_examples: settings.
        name: in records.
    """

    frame: Any
    test: Any = None
    label: str | None = None
    client: str | None = None
    group: str | None = None
    features: list[str] | None = None
    exclude: list[str] | None = None
    categorical: list[str] | None = None
    missing: list[str] | None = None
    fit: str | None = None
    min_examples: int | None = None
    name: str = "table"

    def card(self) -> Card:
        """Return what is read of the table, before anything is trained; it prints as a table."""
        given = check_component({TARGET: f"{load.__module__}.{load.__name__}", **self.settings()}, "data")
        data = bind(given, "data")()
        return Card((*data.card.lines, *(("warning", note) for note in data.notes)), data.card.columns)

    def settings(self) -> dict[str, Any]:
        """Return the settings of `data=table`; frames are kept in this process under a name."""
        values = {"path": self.frame} | {each.name: getattr(self, each.name) for each in fields(self)[1:-1]}
        given: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
        given |= {key: str(given[key]) for key in ("label", "client", "group") if key in given}
        for key, name in (("path", self.name), ("test", f"{self.name}_test")):
            if key in given and not isinstance(given[key], str | Path):
                given[key] = keep_object(name, given[key])
        return given


@dataclass(frozen=True)
class Encoder:
    """Maps rows of a table to inputs by scikit-learn: numbers standardised, categories one-hot, missing values filled.

    Args:
        numbers, categories: names of the columns.
        missing: words that are missing values, in lower case.
        fitted: a `ColumnTransformer` of all clients, see `Partition.common`; after it, if each has its own, theirs.
    """

    numbers: list[str]
    categories: list[str]
    missing: Sequence[str] = ()
    fitted: Sequence[Any] = ()

    def columns(self, frame: Any) -> DataFrame:
        """Return the columns as float64 or text; missing values are NaN.

        Raises:
            SettingsError: a column is missing, or has text in place of numbers.
        """
        from pandas import DataFrame

        check_columns("the table", frame, [*self.numbers, *self.categories])
        found: dict[str, Any] = {}
        for name in self.numbers:
            with reading(f"column {name!r}", "finite numbers"):
                if (cells := numbers_of_cells(frame[name], self.missing)) is None:
                    raise ValueError("there is text")
                found[name] = cells
        for name in self.categories:
            found[name] = without(names_of_cells(frame[name]), self.missing)
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
    group: str | None = None,
    features: list[str] | None = None,
    exclude: list[str] | None = None,
    categorical: list[str] | None = None,
    missing: list[str | int | float | None] | None = None,
    fit: Literal["all", "client"] = "all",
    min_examples: Count = 8,
) -> Dataset:
    """Load CSV, JSON lines or Parquet. Numbers are standardised, categories one-hot, missing values filled.

    Rows without a label, client or group are left out. By default, `model=tabular_mlp`; without `test`, `split=merged`;
    with `client`, `partition=by_client`, with a client for each value.

    Args:
        path: the file.
        test: a file of test rows, whose columns are matched by name; None: `split` draws them.
        label: column of the targets. Text, booleans and integers are classes, other numbers are values.
        client: column of the clients, such as hospitals or schools, whose values are their names.
        group: column of groups, such as patients, whose rows are all in one of a division's parts; for split=merged.
        features: columns of the inputs; None: all others but one that counts the rows.
        exclude: columns that are no inputs.
        categorical: columns of numbers that are categories; columns of text always are.
        missing: words that are missing values, in upper or lower case, besides empty cells, and among numbers NA, NaN,
            null, None, ?, . and -; None: NA, None and such words in columns of labels, clients and groups are an error,
            and else categories.
        fit: the training rows that give means, deviations and fillings: of all clients, or each client's own.
        min_examples: clients with fewer usable rows in `path` are left out.

    Returns:
        x [n, features] float32, after the partition. The name is the file name without its ending.

    Raises:
        SettingsError: the file cannot be read, or a column is missing or is no number and no category.
    """
    import pandas

    given = dict(path=path, test=test, label=label, client=client, group=group, missing=missing)
    source = Source.of({**given, "min_examples": min_examples})
    rows, inputs = _read(source, features, exclude or (), categorical or ())
    encoder = Encoder(
        [column.name for column in inputs if column.is_number],
        [column.name for column in inputs if not column.is_number],
        source.missing or (),
    )
    numbers_first = sorted(inputs, key=lambda column: not column.is_number)
    content: Any = pandas.DataFrame({column.name: column.cells for column in numbers_first})

    def fitted(dataset: Dataset, partition: Partition) -> Dataset:
        whole = np.unique(np.concatenate(partition.common))
        with reading(given_as("data.path", path), "finite numbers"):
            every = encoder.fit(content.iloc[whole])
            x = np.asarray(every.transform(content), np.float32)
            used = [every]
            if fit == "client":
                known = every.named_transformers_["categories"][-1].categories_ if encoder.categories else "auto"
                for parts in zip(partition.train, partition.val, partition.test, strict=True):
                    own = np.concatenate(parts)
                    used.append(encoder.fit(content.iloc[parts[0]], known))
                    x[own] = used[-1].transform(content.iloc[own])
        return replace(dataset, x=x, encoder=dumped(replace(encoder, fitted=used)))

    notes = (*rows.targets.notes, *doubts(rows.targets.name, inputs, rows.targets, source.missing))
    dataset = rows.dataset(content, np.float32, fit=fitted)
    return replace(dataset, notes=notes, card=card_of(source, rows, inputs))


def defaults(load: partial[Dataset]) -> dict[str, Any]:
    """Return the settings of a run that a table chooses unless they are given, by key; `load` has its settings."""
    return defaults_of(load, "tabular_mlp", lambda source, its: _rows(source, its["features"], its["categorical"]))


def _rows(source: Source, features: Sequence[str] | None, categorical: Sequence[str] | None) -> Rows:
    texts = categorical or ()
    return read_rows("table", source, None if features is None else [*features, *texts], texts)


def _read(
    source: Source, features: Sequence[str] | None, exclude: Sequence[str], categorical: Sequence[str]
) -> tuple[Rows, list[Column]]:
    """Return the rows of a table, and its inputs."""
    rows, where = _rows(source, features, categorical), given_as("data.path", source.path)
    check_columns(where, rows.frame, [*categorical, *exclude])
    others = [name for name in rows.frame.columns if name not in (source.label, source.client, source.group)]
    named = {*(features or ()), *categorical}
    left = {*exclude, *(rows.aside - named)}
    used = [name for name in others if name not in left] if features is None else list(features)
    if not {*used} <= {*others} or not used or named & {*exclude}:
        raise SettingsError(
            f"data.features={list(used)}: expected columns other than data.label, data.client, data.group and those of "
            "data.exclude"
        )
    with reading(where, "columns of numbers and text"):
        inputs = [*columns_of(rows, used, categorical, source.missing or ())]
    check_inputs(where, inputs, named, exclude)
    return rows, inputs
