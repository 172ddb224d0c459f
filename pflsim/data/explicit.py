"""Partitions that list the rows of every client: from a JSON file, a dict, or a partitioner of flwr-datasets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pflsim.config.names import listed
from pflsim.data.content import partition_hash
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.data.sources.common import reading
from pflsim.errors import SettingsError
from pflsim.types import SPLITS, Split

NUMBERINGS = ("parts", "all")
OTHER_KEYS = (
    *("numbering", "hash", "data", "partition", "split"),
    *("clients", "classes", "examples", "per_client", "class_counts", "shift", "unshifted_hash", "inputs"),
)
"""Further keys of partition.json."""
FORM = '{"train": [[...], ...], "test": [[...], ...]}'


def explicit(
    dataset: Dataset, clients: int, rows: Mapping[str, Any] | None = None, *, path: str | None = None
) -> Partition:
    """Give each client the rows that a file lists. Rows count in the order of the files or objects they come from.

    Args:
        dataset: the data set.
        clients: N, the number of lists.
        rows: the content of the file as a dict, instead of `path`.
        path: a JSON file {"train": [[...], ...], "val": ..., "test": ..., "numbering": ...} with one list of row
            numbers per client, for example a run's partition.json. With "numbering": "parts" (default), rows of train
            and val count from 0 in the training part, and rows of test from 0 in the test part; with "all", they count
            through the training part and then the test part. Without "val" there are no validation rows. With neither
            "val" nor "test", `split` draws both, as for the other partitions; otherwise `split` has no effect.

    Returns:
        The partition; `test` is () if there are no test rows.

    Raises:
        SettingsError: the file cannot be read, `clients` is not the number of lists, a client has no training or test
            rows, a row does not exist or is listed twice, or "hash" in the file is of other data.
    """
    where = f"partition.path={path}" if rows is None else "partition"
    given = _read(path) if rows is None else rows
    numbering = given.get("numbering", "parts")
    if numbering not in NUMBERINGS:
        raise SettingsError(f'{where}: "numbering" is {numbering!r}, expected {listed(NUMBERINGS, "or")}')
    if unknown := [key for key in given if key not in (*SPLITS, *OTHER_KEYS)]:
        raise SettingsError(f'{where}: "{unknown[0]}" is not known; expected {FORM}')
    names: list[Split] = [name for name in SPLITS if name in given]
    if "train" not in names or names == ["train", "val"]:
        missing = "test" if "train" in names else "train"
        raise SettingsError(f'{where}: "{missing}" is missing; expected {FORM}')
    found: dict[Split, tuple[np.ndarray, ...]] = {}
    for name in names:
        if not isinstance(given[name], list | tuple):
            raise SettingsError(f'{where}: "{name}" is no list; expected {FORM}')
        if len(given[name]) != clients:
            raise SettingsError(
                f'{where}: "{name}" lists the rows of {len(given[name])} clients, but clients={clients}; set '
                f"clients={len(given[name])}"
            )
        part = range(len(dataset.y))
        if numbering == "parts":
            part = part[dataset.train_size :] if name == "test" else part[: dataset.train_size]
        lists = enumerate(given[name])
        found[name] = tuple(_rows(f"{where}: {name} rows of client {client}", each, part) for client, each in lists)
        for client, each in enumerate(found[name]):
            if not len(each) and name != "val":
                raise SettingsError(f"{where}: client {client} has no {name} rows; expected at least one")
    _check_once(where, found, {"test": dataset.train_size} if numbering == "parts" else {})
    none = (np.empty(0, np.int64),) * clients
    partition = Partition(found["train"], found.get("val", none), found.get("test", ()))
    if "hash" in given and given.get("unshifted_hash", given["hash"]) != partition_hash(dataset, partition):
        raise SettingsError(
            f"{where}: the hash differs, so these rows were other examples when the file was written; use the same "
            'data, or remove "hash" from the file'
        )
    return partition


def _read(path: str | None) -> Mapping[str, Any]:
    if not path:
        raise SettingsError("partition=explicit needs partition.path=FILE.json with the rows of every client")
    with reading(f"partition.path={path}", f"a JSON file {FORM}"):
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))


def _rows(where: str, given: Any, part: range) -> np.ndarray:
    """Return row numbers inside a part as ascending row numbers of the data set."""
    try:
        rows = np.asarray(given)
    except ValueError:  # lists of different lengths
        rows = np.empty((0, 0))
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise SettingsError(f"{where}: expected a list of integers")
    wrong = rows[(rows < 0) | (rows >= len(part))]
    if len(wrong):
        raise SettingsError(f"{where}: row {wrong[0]} does not exist; expected 0..{len(part) - 1}")
    return np.sort(rows.astype(np.int64)) + part.start


def _check_once(where: str, found: Mapping[Split, tuple[np.ndarray, ...]], starts: Mapping[Split, int]) -> None:
    """Refuse a row that is listed twice. The rows of a split count from its `starts`, or from 0."""
    lists: list[tuple[Split, int, np.ndarray]] = [
        (name, client, rows) for name, clients in found.items() for client, rows in enumerate(clients)
    ]
    every = np.concatenate([rows for *_, rows in lists])
    order = np.argsort(every, kind="stable")
    twice = np.flatnonzero(np.diff(every[order]) == 0)
    if len(twice):
        ends = np.cumsum([len(rows) for *_, rows in lists])
        first, second = (lists[np.searchsorted(ends, order[twice[0] + i], side="right")] for i in (0, 1))
        row = every[order[twice[0]]] - starts.get(first[0], 0)
        raise SettingsError(
            f"{where}: row {row} is in {first[0]} of client {first[1]} and in {second[0]} of client {second[1]}; "
            "expected every row once"
        )


def from_flwr(partitioner: Any, dataset: Any) -> dict[str, list[list[int]]]:
    """Return the partition that a partitioner of flwr-datasets makes of the training part, for `explicit`.

    The rows are numbered before the partitioner gets them, because some partitioners sort their data set.

    Args:
        partitioner: without a data set, for example `DirichletPartitioner(num_partitions=10, partition_by="label",
            alpha=0.3)`.
        dataset: the training part, a Hugging Face data set.

    Returns:
        {"train": the rows of each partition}.
    """
    partitioner.dataset = dataset.add_column("pflsim_row", list(range(len(dataset))))
    clients = range(partitioner.num_partitions)
    return {"train": [[int(row) for row in partitioner.load_partition(i)["pflsim_row"]] for i in clients]}
