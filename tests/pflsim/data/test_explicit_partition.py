"""Partitions with given rows: files, dicts, own rules, partitioners of flwr-datasets, and the command `partition`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import refusing, settings_of

from pflsim import cli
from pflsim.commands import overrides
from pflsim.config.settings import Settings
from pflsim.data import partitions, splits
from pflsim.data.content import partition_hash
from pflsim.data.dataset import Dataset
from pflsim.data.explicit import explicit, from_flwr
from pflsim.data.federate import federate, load_federation
from pflsim.data.record import write_partition
from pflsim.errors import SettingsError

TRAIN, TEST = 30, 10
GOOD = {"train": [[4, 0], [7, 29]], "test": [[9], [0, 1]]}


def made() -> Dataset:
    """Rows whose content is in no order, 30 for training and 10 for tests."""
    x = np.random.default_rng(0).integers(0, 256, (TRAIN + TEST, 1, 2, 2)).astype(np.uint8)
    return Dataset("made", x, np.arange(TRAIN + TEST) % 5, 5, TRAIN)


def saved(tmp_path: Path, content: object) -> str:
    path = tmp_path / "rows.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def lists(parts: Any) -> list[list[int]]:
    return [part.tolist() for part in parts]


def test_rows_count_in_each_part_or_through_both(tmp_path: Path) -> None:
    parts = explicit(made(), 2, path=saved(tmp_path, {**GOOD, "val": [[], [3]]}))
    assert lists(parts.train) == [[0, 4], [7, 29]] and lists(parts.val) == [[], [3]]
    assert lists(parts.test) == [[39], [30, 31]]
    through = explicit(made(), 2, {"numbering": "all", "train": [[35], [0]], "test": [[1], [39]]})
    assert lists(through.train) == [[35], [0]] and lists(through.test) == [[1], [39]]
    assert lists(through.val) == [[], []]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train": [[0], [1], [2]]}, ["clients=2", "list of 3"]),
        ({"train": [[0, 5], [5]]}, ["row 5"]),
        ({"train": [[0, 0], [5]]}, ["row 0"]),
        ({"val": [[7], [8]]}, ["row 7"]),
        ({"test": [[3], [3]]}, ["row 33"]),
        ({"train": [[0], [-1]]}, ["train", "client 1", "-1", "0..29"]),
        ({"test": [[1], [10]]}, ["test", "client 1", "10", "0..9"]),
        ({"numbering": "all", "test": [[40], [39]]}, ["client 0", "40", "0..39"]),
        ({"train": [[1], []]}, ["train", "client 1"]),
        ({"train": [[1], [2.5]]}, ["client 1", "integers"]),
        ({"train": [[1], ["a"]]}, ["client 1", "integers"]),
        ({"train": 3}, ["train", "clients=2"]),
        ({"numbering": "rows"}, ["numbering", "file"]),
        ({"hash": "0" * 64}, ["hash"]),
        ({"tset": [[0], [1]]}, ["tset"]),
        ({"names": ["a"]}, ["names", "clients=2"]),
        ({"names": [1, 2]}, ["names", "text"]),
    ],
)
def test_wrong_rows_are_refused(tmp_path: Path, change: dict[str, Any], says: list[str]) -> None:
    for given in ({"path": saved(tmp_path, {**GOOD, **change})}, {"rows": {**GOOD, **change}}):
        with refusing("partition", *says):
            explicit(made(), 2, **given)


@pytest.mark.parametrize("content", ["[1, 2]", "{", '{"test": [[1], [2]]}', '{"train": [[1], [2]], "val": [[3], []]}'])
def test_files_that_are_no_partition_are_refused(tmp_path: Path, content: str) -> None:
    for path in (saved(tmp_path, content), str(tmp_path / "gone.json"), str(tmp_path), None):
        with pytest.raises(SettingsError, match="partition"):
            explicit(made(), 2, path=path)


def settings(tmp_path: Path, partition: dict[str, Any], clients: int = 2, **split: Any) -> Settings:
    data = made()
    names = {"train": slice(None, TRAIN), "test": slice(TRAIN, None)}
    arrays = {f"{axis}_{name}": getattr(data, axis)[rows] for name, rows in names.items() for axis in "xy"}
    np.savez(tmp_path / "mine.npz", **arrays)
    return Settings(
        data={"_target_": "pflsim.data.sources.npz.load", "path": str(tmp_path / "mine.npz")},
        partition=partition,
        split={"_target_": "pflsim.data.splits.official", **split},
        clients=clients,
    )


def test_the_split_draws_test_rows_only_if_none_are_given(tmp_path: Path) -> None:
    node = {"_target_": "pflsim.data.explicit.explicit", "path": saved(tmp_path, {**GOOD, "names": ["b", "a"]})}
    _, partition = load_federation(settings(tmp_path, node))
    assert partition.names == ("b", "a")
    assert lists(partition.train) == [[0, 4], [7, 29]] and lists(partition.val) == [[], []]
    for name, value in {"validation": 0.2, "test_by": "clients"}.items():
        with pytest.raises(SettingsError, match=f"split.{name}={value}"):
            load_federation(settings(tmp_path, node, **{name: value}))
    own = [list(range(0, 30, 2)), list(range(1, 30, 2))]
    node["path"] = saved(tmp_path, {"train": own})
    _, drawn = load_federation(settings(tmp_path, node, validation=0.2))
    assert [sorted([*t, *v]) for t, v in zip(drawn.train, drawn.val, strict=True)] == own
    assert [len(rows) for rows in drawn.val] == [3, 3]
    assert all(len(rows) and rows.min() >= TRAIN for rows in drawn.test)


@pytest.mark.parametrize("split", [splits.official, splits.merged, partial(splits.counts, train=6, test=2)])
def test_a_record_reproduces_its_partition(tmp_path: Path, split: Any) -> None:
    data = made()
    partition = federate(data, partitions.iid, split, 3, 5)
    write_partition(tmp_path, data, partition, {"partition": "iid", "split": "", "shift": ""})
    again = explicit(data, 3, path=str(tmp_path / "partition.json"))
    assert all(lists(getattr(again, s)) == lists(getattr(partition, s)) for s in ("train", "val", "test"))
    assert partition_hash(data, again) == partition_hash(data, partition)
    data.x[partition.train[0][0]] ^= 1
    with pytest.raises(SettingsError, match="hash"):
        explicit(data, 3, path=str(tmp_path / "partition.json"))


def test_clients_have_the_names_of_the_data(tmp_path: Path) -> None:
    people = np.array(["zoe", "ann", "bob", "Eve"])[np.arange(TRAIN + TEST) // 2 % 4]
    data = replace(made(), clients=people)
    assert data.client_names == ("Eve", "ann", "bob", "zoe")
    assert data.clients[:4].tolist() == [3, 3, 1, 1]
    one = {"_target_": "pflsim.data.partitions.by_client", "ids_per_client": 1}
    chosen = overrides.values_of({"data": data})["data"]
    for node, clients, names in (
        (one, 4, ("Eve", "ann", "bob", "zoe")),
        ({"_target_": one["_target_"]}, 2, ()),
        ({"_target_": "pflsim.data.partitions.iid"}, 4, ()),
    ):
        given = replace(settings(tmp_path, node, clients), data={"_target_": chosen})
        dataset, partition = load_federation(given)
        assert partition.names == names
        for client, name in enumerate(names):
            assert {*people[partition.train[client]]} == {name}
        write_partition(tmp_path, dataset, partition, {"partition": "", "split": "", "shift": ""})
        record = json.loads((tmp_path / "partition.json").read_text())
        assert record.get("names", []) == [*names]
        again = explicit(dataset, clients, path=str(tmp_path / "partition.json"))
        assert again.names == names and partition_hash(dataset, again) == record["hash"]


def own_rule(labels: Any, num_classes: int, clients: int, rng: Any, client_ids: Any) -> list[np.ndarray]:
    """Neighbouring rows, as the user stored them."""
    if client_ids is not None:
        assert (client_ids == np.arange(len(labels))).all()
    return np.array_split(np.arange(len(labels)), clients)


@pytest.mark.parametrize("client_ids", [None, np.arange(TRAIN + TEST)])
def test_rows_of_an_own_rule_are_those_of_the_user(client_ids: np.ndarray | None) -> None:
    data = replace(made(), clients=client_ids)
    partition = federate(data, own_rule, partial(splits.official, validation=0.0), 4, 0)
    assert lists(partition.train) == lists(np.array_split(np.arange(TRAIN), 4))
    merged = federate(data, partial(own_rule), splits.merged, 4, 0)
    every = [np.sort(np.concatenate(rows)) for rows in zip(merged.train, merged.val, merged.test, strict=True)]
    assert lists(every) == lists(np.array_split(np.arange(TRAIN + TEST), 4))


class Table(dict[str, list[int]]):
    """What `from_flwr` uses of a Hugging Face data set: columns."""

    def __len__(self) -> int:
        return len(self["label"])

    def add_column(self, name: str, column: list[int]) -> Table:
        return Table({**self, name: column})

    def select(self, rows: list[int]) -> Table:
        return Table({name: [column[row] for row in rows] for name, column in self.items()})


class SortedPartitioner:
    """Like `ShardPartitioner` of flwr-datasets: it sorts its data set by label, then deals it in blocks."""

    num_partitions = 2
    dataset: Table

    def load_partition(self, partition_id: int) -> Table:
        rows = sorted(range(len(self.dataset)), key=lambda row: self.dataset["label"][row])
        half = len(rows) // 2
        return self.dataset.select(rows[:half] if partition_id == 0 else rows[half:])


def test_a_partitioner_of_flwr_means_the_rows_before_it_sorted_them() -> None:
    labels = [1, 0, 1, 0, 0, 1]
    assert from_flwr(SortedPartitioner(), Table(label=labels)) == {"train": [[1, 3, 4], [0, 2, 5]]}


def test_command_partition_is_the_partition_of_a_run(
    here: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data=digits", "partition=dirichlet", "clients=4", "seed=3"]
    assert cli.main(["partition", *words, "into=here"]) == 0
    record = json.loads(Path("here/partition.json").read_text())
    assert record["hash"] == partition_hash(*load_federation(settings_of(*words)))
    assert Path("here/partition.png").stat().st_size > 2000
    printed = capsys.readouterr().out
    assert record["hash"] in printed and len(printed.splitlines()) < 10
    assert "here" in refused("partition", *words, "into=here"), "files are not overwritten"
    again = ["partition", "data=digits", "partition=explicit", "partition.path=here/partition.json"]
    assert cli.main(again) == 0
    assert json.loads(Path("partition/partition.json").read_text())["hash"] == record["hash"]
    assert "list of 4" in refused(*again, "clients=3", "into=other")
    rows = {key: record[key] for key in ("train", "test", "numbering")}
    assert settings_of(data="digits", partition=rows).clients == 4


def test_own_rules_that_fail_or_draw_from_a_global_generator() -> None:
    def fails(labels: Any, *_: Any) -> list[np.ndarray]:
        return labels["a"]

    def draws(labels: Any, num_classes: int, clients: int, *_: Any) -> list[np.ndarray]:
        return np.array_split(np.random.permutation(len(labels)), clients)  # noqa: NPY002

    with pytest.raises(SettingsError, match=r"IndexError.*test_explicit_partition.py, line \d+"):
        federate(made(), fails, splits.merged, 4, seed=0)
    one, two = (federate(made(), draws, splits.merged, 4, seed=0) for _ in range(2))
    assert all(map(np.array_equal, one.train, two.train))
