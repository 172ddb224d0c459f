"""Partitions that list the rows of every client: from a JSON file, a dict, or a partitioner of flwr-datasets."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pflsim.config.components import TARGET, kept_object
from pflsim.config.validate import checked
from pflsim.data.content import partition_hash
from pflsim.data.dataset import Dataset
from pflsim.data.federate import valid_rows
from pflsim.data.federated import Partition
from pflsim.errors import SettingsError, reading
from pflsim.types import SPLITS, Split

OTHER_KEYS = (
    *("numbering", "hash", "data", "partition", "split"),
    *("clients", "classes", "examples", "class_counts", "shift", "unshifted_hash", "inputs", "names", "values", "task"),
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
            numbers per client, for example a run's partition.json. With "numbering": "file", rows count from 0 through
            the file of the training part and then that of the test part, also if some are left out; with "all", only
            those that are used count; with "parts" (default), too, and rows of test count from 0 in the test part.
            Without "val" there are no validation rows. With neither "val" nor "test", `split` draws both, as for the
            other partitions; otherwise `split` takes no setting.
            "names" are those of the clients.

    Returns:
        The partition; `test` is () if there are no test rows.

    Raises:
        SettingsError: the file cannot be read, `clients` is not the number of lists, a client has no training or test
            rows, a row does not exist or is listed twice, names are missing, or "hash" in the file is of other data.
    """
    where = f"partition.path={path}" if rows is None else "partition"
    given = _read(path) if rows is None else rows
    numbering = checked(f"{where}: numbering", Literal["parts", "all", "file"], given.get("numbering", "parts"))
    if unknown := [key for key in given if key not in (*SPLITS, *OTHER_KEYS)]:
        raise SettingsError(f'{where}: "{unknown[0]}" is not known; expected {FORM}')
    names: list[Split] = [name for name in SPLITS if name in given]
    if "train" not in names or names == ["train", "val"]:
        missing = "test" if "train" in names else "train"
        raise SettingsError(f'{where}: "{missing}" is missing; expected {FORM}')
    found: dict[Split, tuple[np.ndarray, ...]] = {}
    for name in names:
        part = range(len(dataset.y))
        if numbering == "parts":
            part = part[dataset.train_size :] if name == "test" else part[: dataset.train_size]
        known = None if numbering != "file" else dataset.rows
        least, end = int(name != "val"), len(part) if known is None else int(known[-1]) + 1
        rows_of_clients = valid_rows(given[name], clients, end, f"{where}: {name} rows", least)
        if known is not None:
            rows_of_clients = tuple(_places(known, rows, f"{where}: {name} rows") for rows in rows_of_clients)
        found[name] = tuple(each + part.start for each in rows_of_clients)
    rows_of_all, times = np.unique(np.concatenate([rows for name in found for rows in found[name]]), return_counts=True)
    if twice := rows_of_all[times > 1].tolist():
        raise SettingsError(f"{where}: row {twice[0]} of all examples is listed twice; expected every row once")
    none = (np.empty(0, np.int64),) * clients
    called = tuple(checked(f"{where}: names", list[str], given.get("names", [])))
    if called and len(called) != clients:
        raise SettingsError(f"{where}: {len(called)} names, expected one for each of clients={clients}")
    partition = Partition(found["train"], found.get("val", none), found.get("test", ()), names=called)
    if "hash" in given and given.get("unshifted_hash", given["hash"]) != partition_hash(dataset, partition):
        raise SettingsError(
            f"{where}: the hash differs, so these rows were other examples when the file was written; use the same "
            'data, or remove "hash" from the file'
        )
    return partition


def _places(known: np.ndarray, rows: np.ndarray, what: str) -> np.ndarray:
    """Return where rows of the user's files are among those that are used."""
    if lacking := rows[~np.isin(rows, known)].tolist():
        raise SettingsError(f"{what}: row {lacking[0]} of the files is left out, because of its label or client")
    return np.searchsorted(known, rows)


def clients_of(partition: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of clients as `{"clients": N}`, if the component `partition` lists their rows; else {}."""
    kept, path = kept_object(str(partition.get(TARGET)), "partition"), str(partition.get("path"))
    is_file = kept is None and Path(path).is_file()  # without one, a run stops later
    rows = _read(path) if is_file else getattr(kept, "rows", {})
    train = rows.get("train")
    return {"clients": len(train)} if isinstance(train, list | tuple) else {}


def _read(path: str | None) -> Mapping[str, Any]:
    if not path:
        raise SettingsError("partition=explicit needs partition.path=FILE.json with the rows of every client")
    with reading(f"partition.path={path}", f"a JSON file {FORM}"):
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))


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
