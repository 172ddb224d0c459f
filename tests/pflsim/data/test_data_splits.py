"""Splits, the wiring of partition and split, and what makes a partition the same partition."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pflsim.data import partitions, splits
from pflsim.data.content import content_order, partition_hash
from pflsim.data.dataset import Dataset
from pflsim.data.federate import federate
from pflsim.data.federated import class_counts, shard
from pflsim.data.record import write_partition
from pflsim.data.splits import own_test_counts
from pflsim.errors import SettingsError

SPLITS = {"official": splits.official, "merged": splits.merged, "counts": partial(splits.counts, train=20, test=6)}
PARTITIONS = {
    "iid": partitions.iid,
    "dirichlet": partial(partitions.dirichlet, alpha=0.5, min_examples=27),
    "classes_per_client": partitions.classes_per_client,
    "label_lognormal": partitions.label_lognormal,
    "one_class": partitions.one_class,
    "dominant_classes": partitions.dominant_classes,
    "n_way_k_shot": partial(partitions.n_way_k_shot, k=16, even=True),
    "by_client": partitions.by_client,
}


def make(train=800, test=200, classes=10, seed=0):
    """Every example has its own number in its pixels, so that content tells which it is."""
    n = train + test
    numbers = np.arange(n)
    x = np.stack([numbers // 256, numbers % 256], axis=1).astype(np.uint8).reshape(n, 1, 1, 2)
    labels = np.concatenate([np.arange(train) % classes, np.arange(test) % classes])
    client_ids = np.random.default_rng(seed).permutation(numbers % 40)
    return Dataset("made", x, labels.astype(np.int64), classes, train, clients=client_ids.astype(np.int64))


def shuffled(dataset, seed):
    """The same data with the rows of either official part in another order."""
    rng = np.random.default_rng(seed)
    k = dataset.train_size
    order = np.concatenate([rng.permutation(k), k + rng.permutation(len(dataset.y) - k)])
    return dataclasses.replace(dataset, x=dataset.x[order], y=dataset.y[order], clients=dataset.clients[order])


def examples(dataset, rows):
    """The numbers that the pixels of these rows spell."""
    pixels = dataset.x[rows].reshape(-1, 2).astype(int)
    return sorted((pixels[:, 0] * 256 + pixels[:, 1]).tolist())


def contents(dataset, partition):
    return [[examples(dataset, rows) for rows in getattr(partition, s)] for s in ("train", "val", "test")]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("rule", PARTITIONS)
def test_splits_are_disjoint_and_the_same_for_any_row_order(split, rule):
    data = make()
    partition = federate(data, PARTITIONS[rule], SPLITS[split], 10, 7)
    parts = [rows for s in ("train", "val", "test") for rows in getattr(partition, s)]
    every = np.concatenate(parts)
    assert len(np.unique(every)) == len(every) and every.min() >= 0 and every.max() < 1000
    assert all((np.diff(rows) > 0).all() for rows in parts)
    assert all(len(rows) for rows in parts)
    for seed in (1, 2):
        other = shuffled(data, seed)
        again = federate(other, PARTITIONS[rule], SPLITS[split], 10, 7)
        assert contents(other, again) == contents(data, partition)
        assert partition_hash(other, again) == partition_hash(data, partition)


def test_hash_notices_every_change():
    data = make()
    partition = federate(data, partitions.iid, splits.merged, 4, 0)
    seen = {partition_hash(data, partition)}
    moved = dataclasses.replace(partition, val=partition.test, test=partition.val)
    swapped = dataclasses.replace(partition, train=partition.train[::-1])
    x = data.x.copy()
    x[partition.train[0][0], 0, 0, 1] ^= 1
    seen |= {partition_hash(data, moved), partition_hash(data, swapped)}
    seen |= {partition_hash(dataclasses.replace(data, x=x), partition)}
    seen |= {partition_hash(dataclasses.replace(data, clients=None), partition)}
    assert len(seen) == 5
    assert all(len(h) == 64 and set(h) <= set("0123456789abcdef") for h in seen)


def test_hash_is_this_number_on_every_machine():
    data = make(train=8, test=4, classes=2)
    order = content_order(data)
    assert sorted(order.tolist()) == list(range(12))
    partition = federate(data, partitions.iid, splits.official, 2, 0)
    assert partition_hash(data, partition) == "70a45730a522c7bd476563b8e3a024592b8957628ca864e427866468a2d244be"


def test_official_keeps_to_the_official_parts_and_to_the_clients_own_labels():
    data = make(4000, 1000)
    rule = partial(partitions.dirichlet, alpha=0.3)
    partition = federate(data, rule, splits.official, 12, 3)
    assert max(rows.max() for rows in partition.train + partition.val) < 4000
    assert min(rows.min() for rows in partition.test) >= 4000
    held = class_counts(data, partition, "train") + class_counts(data, partition, "val")
    tests = class_counts(data, partition, "test")
    rho = (100 / held.sum(axis=0)).min()
    assert rho == pytest.approx(0.25)
    assert (np.abs(tests - rho * held) <= 1).all()
    assert (tests[held == 0] == 0).all()


@given(st.data())
@settings(max_examples=120)
def test_own_test_counts_hold_what_they_promise(data):
    clients, classes = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
    row = st.lists(st.integers(0, 30), min_size=classes, max_size=classes).filter(any)
    held = np.array(data.draw(st.lists(row, min_size=clients, max_size=clients)))
    there = np.array(data.draw(st.lists(st.integers(0, 20), min_size=classes, max_size=classes)))
    try:
        counts = own_test_counts(held, there, np.random.default_rng(0))
    except SettingsError as error:
        assert "client" in str(error) and ((held > 0).sum(axis=0) > there).any()
        return
    assert (counts.sum(axis=0) <= there).all()
    assert (counts[held == 0] == 0).all() and (counts >= 0).all()
    assert (counts.sum(axis=1) >= 1).all()


@pytest.mark.parametrize("rule", [partitions.iid, partial(partitions.dominant_classes, dominant=2)])
def test_the_dealing_of_tests_favours_no_client_id(rule):
    """Equal clients get equally many, whoever they are, and the spare ones of a class go to others than the last's."""
    data = make(4000, 300)
    sizes, gaps = [], []
    for seed in range(8):
        partition = federate(data, rule, splits.official, 20, seed)
        tests = class_counts(data, partition, "test")
        held = class_counts(data, partition, "train") + class_counts(data, partition, "val")
        sizes.append(tests.sum(axis=1))
        shares = held / held.sum(axis=1, keepdims=True) - tests / tests.sum(axis=1, keepdims=True)
        gaps.append(np.abs(shares).sum(axis=1) / 2)
    assert np.ptp(np.array(sizes), axis=1).max() <= 3
    assert np.ptp(np.mean(sizes, axis=0)) < 1
    assert np.mean(gaps, axis=0).max() < 0.2, "test shards stray from the clients' own label distribution"


def test_official_by_client_tests_on_the_clients_own_examples():
    data = make()
    rule = partial(splits.official, test_by="clients")
    partition = federate(data, partitions.by_client, rule, 8, 0)
    for client in range(8):
        mine = set(data.clients[np.concatenate([partition.train[client], partition.val[client]])].tolist())
        assert set(data.clients[partition.test[client]].tolist()) <= mine
    assert sum(len(rows) for rows in partition.test) == 200
    with pytest.raises(SettingsError, match="needs a data set with clients"):
        federate(dataclasses.replace(data, clients=None), partitions.iid, rule, 4, 0)
    apart = np.concatenate([np.arange(800) % 20, 20 + np.arange(200) % 20])
    with pytest.raises(SettingsError, match="client 0 has no .*split=merged"):
        federate(dataclasses.replace(data, clients=apart), partitions.by_client, rule, 4, 0)


@pytest.mark.parametrize("fraction", [0.75, 0.7, 0.5])
def test_merged_splits_each_client_class_by_class(fraction):
    data = make()
    rule = partial(splits.merged, fraction=fraction, validation=0.0, stratify=True)
    partition = federate(data, partitions.classes_per_client, rule, 10, 1)
    train, test = class_counts(data, partition, "train"), class_counts(data, partition, "test")
    total = train + test
    assert total.sum() == 1000
    assert (np.abs(train - fraction * total) <= 1).all()
    assert (np.abs(train.sum(axis=1) - fraction * total.sum(axis=1)) <= 0.5).all()
    assert all(len(rows) == 0 for rows in partition.val)


def test_counts_are_exact_and_in_the_clients_own_distribution():
    data = make(4000, 1000)
    dealt = []

    def spy(labels, *rest):
        parts = partitions.dirichlet(labels, *rest, alpha=1.0, min_examples=240)
        dealt[:] = [np.bincount(labels[rows], minlength=10) / len(rows) for rows in parts]
        return parts

    partition = federate(data, spy, partial(splits.counts, train=200, test=40, validation=0.1, stratify=True), 10, 2)
    assert [len(r) for r in partition.train] == [180] * 10
    assert [len(r) for r in partition.val] == [20] * 10
    assert [len(r) for r in partition.test] == [40] * 10
    train = class_counts(data, partition, "train") + class_counts(data, partition, "val")
    test = class_counts(data, partition, "test")
    assert np.abs(train + test - 240 * np.array(dealt)).max() <= 1
    assert np.abs(test - 40 * np.array(dealt)).max() <= 1.2


def test_stratified_splits_are_those_of_earlier_versions():
    """Hashes of commit 7eb01b5."""
    data, rule = make(seed=3), partial(partitions.dirichlet, alpha=0.5, min_examples=27)
    for split, expected in {
        partial(splits.merged, stratify=True): "0714e2d810b7d928",
        partial(splits.counts, train=20, test=6, stratify=True): "99324324257dd8fa",
        splits.official: "da736d480d25af1c",
    }.items():
        assert partition_hash(data, federate(data, rule, split, 10, 7)).startswith(expected)


@pytest.mark.parametrize("part", ["test", "val"])
@pytest.mark.parametrize(
    ("split", "least", "most"),
    [
        (splits.merged, 0.85, 1.15),
        (partial(splits.counts, train=22, test=8), 0.85, 1.15),
        (partial(splits.merged, stratify=True), 0, 0.6),
        (partial(splits.counts, train=22, test=8, stratify=True), 0, 0.6),
    ],
)
def test_the_labels_of_test_rows_follow_those_of_training_rows_only_if_stratified(split, least, most, part):
    """Two random parts of n + m rows differ in their means with the variance s² (1/n + 1/m), so the deviation is 1."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(400 * 32, 3)).astype(np.float32), rng.integers(0, 2, 400 * 32)
    data = Dataset("labels", x, y, 2, len(y), clients=np.arange(len(y)) // 32)
    rule = partial(split, validation=0.25)
    partition, found = federate(data, partitions.by_client, rule, 400, 0), []
    for one, other in zip(getattr(partition, part), partition.train, strict=True):
        spread = np.concatenate([y[one], y[other]]).std(ddof=1) * np.sqrt(1 / len(one) + 1 / len(other))
        found.append((y[one].mean() - y[other].mean()) / spread)
    assert least <= np.std(found) <= most


@given(validation=st.floats(0, 0.99), clients=st.integers(1, 120), seed=st.integers(0, 50))
@settings(max_examples=30)
def test_validation_is_the_share_it_says_and_leaves_a_training_example(validation, clients, seed):
    data = make(240, 240)
    partition = federate(data, partitions.iid, partial(splits.official, validation=validation), clients, seed)
    for train, val in zip(partition.train, partition.val, strict=True):
        n = len(train) + len(val)
        assert len(train) >= 1
        if validation == 0:
            assert len(val) == 0
        else:
            assert len(val) >= 1
            assert abs(len(val) - validation * n) <= 1


def test_validation_is_stratified():
    data = make(4000, 1000)
    partition = federate(data, partitions.classes_per_client, partial(splits.official, validation=0.2), 10, 0)
    train, val = class_counts(data, partition, "train"), class_counts(data, partition, "val")
    assert (np.abs(val - 0.2 * (train + val)) <= 1).all()


@pytest.mark.parametrize(
    ("data", "split", "clients", "says"),
    [
        (make(800, 50), splits.official, 60, "60 clients .*split=merged"),
        (make(), splits.counts, 10, "client 0"),
        (make(8, 2), splits.merged, 10, "client 0"),
        (make(), splits.official, 801, "800"),
    ],
)
def test_too_few_examples_are_an_error(data, split, clients, says):
    with pytest.raises(SettingsError, match=says):
        federate(data, partitions.iid, split, clients, 0)


def test_a_shard_holds_its_clients_examples():
    data = make()
    partition = federate(data, partitions.classes_per_client, splits.official, 5, 0)
    piece = shard(data, partition, 3)
    assert piece.num_examples == len(partition.train[3])
    assert (piece.train.y.numpy() == data.y[partition.train[3]]).all()
    assert class_counts(data, partition, "test")[3].tolist() == np.bincount(piece.test.y, minlength=10).tolist()


def test_record_says_who_holds_what(tmp_path):
    data = make(450, 150)
    partition = federate(data, partitions.classes_per_client, splits.official, 6, 0)
    names = {"partition": "classes_per_client", "split": "official", "shift": ""}
    digest = write_partition(tmp_path / "run", data, partition, names)
    text = (tmp_path / "run" / "partition.json").read_text()
    record = json.loads(text)
    assert record["hash"] == digest == partition_hash(data, partition)
    assert (record["data"], record["partition"], record["split"]) == ("made", "classes_per_client", "official")
    assert record["clients"] == 6 and record["classes"] == 10 and len(record["class_counts"]) == 6
    for client, row in enumerate(record["class_counts"]):
        assert row["client"] == client
        for split in ("train", "val", "test"):
            rows = getattr(partition, split)[client]
            assert row[split] == [int((data.y[rows] == c).sum()) for c in range(10)]
    assert record["examples"]["train"] == sum(map(len, partition.train))
    assert len(text.splitlines()) < 4 * 6 + 25


def test_sources_import_heavy_libraries_only_when_used():
    heavy = {"torchvision", "sklearn", "PIL", "matplotlib", "pandas"}
    for path in (Path(__file__).parents[3] / "pflsim" / "data").rglob("*.py"):
        at_once = re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        assert not heavy & {*at_once}, path
