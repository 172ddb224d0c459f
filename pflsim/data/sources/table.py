"""Tables of numbers and categories: CSV and Parquet files, and pandas frames, with or without a client for each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pflsim.config.components import TARGET, bind, check_component, keep_object
from pflsim.config.names import some
from pflsim.config.settings import Count
from pflsim.data.dataset import Card, Dataset
from pflsim.data.federated import Partition
from pflsim.data.sources.cells import names_of_cells, numbers_of_cells, without
from pflsim.data.sources.columns import Column, card_of, check_inputs, columns_of, doubts
from pflsim.data.sources.frames import Rows, Source, check_columns, defaults_of, given_as, read_rows
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
class Fitted:
    """What training rows determine.

    Args:
        fillings: of each number, the value that replaces missing ones.
        means, scales: of each number, what is subtracted from it, and what it is divided by after that.
        modes: of each category, the text that replaces missing ones; 0: the rows have none.
        known: of each category, its texts, each of which is an input.
    """

    fillings: list[float]
    means: list[float]
    scales: list[float]
    modes: list[str | int]
    known: list[list[str | int]]

    @classmethod
    def of(cls, transformer: Any) -> Fitted:
        """Return what a fitted `ColumnTransformer` of scikit-learn has."""
        (_, numbers, counted), (_, categories, named) = transformer.transformers_[:2]
        found = (numbers[0].statistics_, numbers[1].mean_, numbers[1].scale_) if counted else [np.empty(0)] * 3
        fillings, means, scales = (values.tolist() for values in found)
        modes = categories[0].statistics_.tolist() if named else []
        known = [texts.tolist() for texts in categories[1].categories_] if named else []
        return cls(fillings, means, scales, modes, known)

    def transform(self, columns: DataFrame) -> np.ndarray:
        """Return the inputs [n, features] float32 of the numbers and, after them, the categories of rows."""
        from pandas import Index

        cells = columns.iloc[:, : len(self.means)].to_numpy(np.float64)
        parts = [(np.where(np.isnan(cells), self.fillings, cells) - self.means) / self.scales] if self.means else []
        for number, (mode, known) in enumerate(zip(self.modes, self.known, strict=True), len(self.means)):
            texts = columns.iloc[:, number]
            codes = Index(known, dtype=object).get_indexer(texts.where(texts.notna(), mode))
            parts.append(np.eye(len(known) + 1, len(known))[codes])  # the last row is that of unknown texts
        return np.hstack(parts).astype(np.float32)


@dataclass(frozen=True)
class Encoder:
    """Maps rows of a table to inputs: numbers standardised, categories one-hot, missing values filled.

    Args:
        numbers, categories: names of the columns.
        missing: words that are missing values, in lower case.
        fitted: to the training rows of all clients, see `Partition.common`; after it, if each has its own, those of the
            clients.
    """

    numbers: list[str]
    categories: list[str]
    missing: Sequence[str] = ()
    fitted: Sequence[Fitted] = ()

    @property
    def inputs(self) -> list[str]:
        """Return the names of the columns."""
        return [*self.numbers, *self.categories]

    def columns(self, frame: Any) -> DataFrame:
        """Return the columns as float64 or text; missing values are NaN.

        Raises:
            SettingsError: a column is missing, or has text in place of numbers.
        """
        from pandas import DataFrame, to_numeric

        check_columns("the table", frame, self.inputs)
        found: dict[str, Any] = {}
        for name in self.numbers:
            with reading(f"column {name!r}", "finite numbers"):
                if (cells := numbers_of_cells(frame[name], self.missing)) is None:
                    found_numbers: Any = to_numeric(frame[name], errors="coerce")
                    unread = frame[name][found_numbers.isna() & frame[name].notna()]
                    raise ValueError(f"there is text, such as {unread.iloc[0]!r}" if len(unread) else "there is text")
                found[name] = cells
        for name in self.categories:
            found[name] = without(names_of_cells(frame[name]), self.missing)
        return DataFrame(found, index=frame.index)

    def fit(self, rows: DataFrame, known: Any = "auto") -> Fitted:
        """Return what rows of `columns` determine by scikit-learn, with these categories of each column."""
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import OneHotEncoder, StandardScaler

        means = SimpleImputer(keep_empty_features=True)
        modes = SimpleImputer(strategy="most_frequent", keep_empty_features=True)
        one_hot = OneHotEncoder(categories=known, handle_unknown="ignore", sparse_output=False)
        numbers = ("numbers", make_pipeline(means, StandardScaler()), self.numbers)
        categories = ("categories", make_pipeline(modes, one_hot), self.categories)
        return Fitted.of(ColumnTransformer([numbers, categories]).fit(rows))

    def __call__(self, frame: DataFrame, client: int | None = None) -> np.ndarray:
        """Return the inputs [n, features] float32 of rows, by what is fitted to a client if each has its own."""
        own = 0 if client is None or len(self.fitted) == 1 else 1 + client
        return self.fitted[own].transform(self.columns(frame))

    def unknown(self, frame: DataFrame) -> Iterator[str]:
        """Yield the texts of each category that no training row has, for a message."""
        found = self.columns(frame)
        for name, known in zip(self.categories, self.fitted[0].known, strict=True):
            if new := [text for text in found[name].dropna().unique() if text not in known]:
                yield f"{name} {some(new)}"


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
            x = every.transform(content)
            used = [every]
            if fit == "client":
                known = [np.array(each, object) for each in every.known] or "auto"
                for parts in zip(partition.train, partition.val, partition.test, strict=True):
                    own = np.concatenate(parts)
                    used.append(encoder.fit(content.iloc[parts[0]], known))
                    x[own] = used[-1].transform(content.iloc[own])
        return replace(dataset, x=x, encoder=replace(encoder, fitted=used))

    notes = (*rows.targets.notes, *doubts(rows.targets.name, inputs, rows.targets, source.missing))
    dataset = rows.dataset(content, np.float32, fit=fitted)
    return replace(dataset, notes=notes, card=card_of(source, rows, inputs))


def defaults(load: partial[Dataset]) -> dict[str, Any]:
    """Return the settings of a run that a table chooses unless they are given, by key; `load` has its settings."""
    return defaults_of(
        load, "tabular_mlp", lambda source, its: _rows(source, its["features"], its["categorical"]).targets
    )


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
