"""Data sets from Python objects, and what a run warns of."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from support import refusing, settings_of
from torch.utils.data import TensorDataset

from pflsim import Table
from pflsim.commands.overrides import values_of
from pflsim.config.components import keep_object
from pflsim.data.content import copied_rows
from pflsim.data.dataset import Dataset, check_dataset, dataset_warnings
from pflsim.data.federate import load_federation
from pflsim.data.federated import Partition
from pflsim.data.sources.own import as_dataset
from pflsim.data.sources.scikit_learn import digits

X = np.random.default_rng(0).integers(0, 256, (6, 5, 7)).astype(np.uint8)
Y = np.arange(6) % 3


class Columns(list[Any]):
    """Rows as Hugging Face's `datasets` gives them."""

    features = column_names = ("img", "label")


def frame(**columns: Any) -> Any:
    return pandas.DataFrame(columns)


@pytest.mark.parametrize(
    "part",
    [
        (X, Y),
        (torch.from_numpy(X), torch.from_numpy(Y)),
        (X, Y[:, None]),
        TensorDataset(torch.from_numpy(X)[:, None], torch.from_numpy(Y)),
        list(zip(X, Y, strict=True)),
        [(Image.fromarray(x), int(y)) for x, y in zip(X, Y, strict=True)],
        Columns({"img": Image.fromarray(x), "label": int(y)} for x, y in zip(X, Y, strict=True)),
    ],
)
def test_objects_of_every_kind(part: Any) -> None:
    for data in (as_dataset(part, part, "mine"), as_dataset({"train": part, "test": part}, name="mine")):
        check_dataset(data, "mine")
        assert np.array_equal(data.x, np.concatenate([X, X])[:, None]) and data.x.dtype == np.uint8
        assert data.y.tolist() == [*Y, *Y] and (data.train_size, data.num_classes, data.name) == (6, 3, "mine")
        assert not dataset_warnings(data)
    alone = as_dataset(part)
    assert (len(alone.y), alone.train_size) == (6, 6), "no test part"


def test_colour_images() -> None:
    colours = np.random.default_rng(1).integers(0, 256, (2, 3, 4, 3)).astype(np.uint8)
    stored = as_dataset([(Image.fromarray(image), 0) for image in colours])
    assert np.array_equal(stored.x, colours.transpose(0, 3, 1, 2))
    tensor = torch.rand(2, 3, 4, 3)
    assert np.array_equal(as_dataset(TensorDataset(tensor, torch.zeros(2, dtype=torch.int64))).x, tensor.numpy())


def test_frames_are_tables() -> None:
    """Columns are matched by name; without a test part, `split` draws test rows."""
    train, test = frame(a=[1, 2, 3], b=[3, 4, 5], label=[0, 1, 0]), frame(label=[1], b=[6], a=[5])
    for data, parts in ((train, (train,)), ((train, test), (train, test))):
        given = values_of({"data": data})
        assert given == values_of({"data": Table(*parts, label="label")}) and given["data"] == "table"


@pytest.mark.parametrize(
    ("labels", "numbers", "values"),
    [
        ([0, 2, 0], [0, 2, 0], (0, 1, 2)),
        ([1, 3, 1], [0, 1, 0], (1, 3)),
        ([0, 10**9, 0], [0, 1, 0], (0, 10**9)),
        ([-1, 1, -1], [0, 1, 0], (-1, 1)),
        (["dog", "cat", "dog"], [1, 0, 1], ("cat", "dog")),
        ([False, True, True], [0, 1, 1], (False, True)),
    ],
)
def test_labels_are_numbered_from_0(labels: list[Any], numbers: list[int], values: tuple[Any, ...]) -> None:
    data = as_dataset((X[:3], np.array(labels)))
    assert data.y.tolist() == numbers and data.num_classes == max(numbers) + 1
    assert data.values == values and not data.notes


def test_both_parts_number_their_labels_alike() -> None:
    data = as_dataset((X[:2], np.array(["b", "c"])), (X[:2], np.array(["longer", "a"])))
    assert data.y.tolist() == [1, 2, 3, 0]
    assert "2 of 4 classes" in dataset_warnings(data)[0], "classes of the test part only"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: as_dataset([(X[0], 0), (X[1, :2], 1)]), ["training", "one shape"]),
        (lambda: as_dataset((X, Y), (X[:, :2], Y)), ["test", "1, 2, 7]"]),
        (lambda: as_dataset((X, Y[:3])), ["training", "[3]", "6 numbers"]),
        (lambda: as_dataset((X.astype(int), Y)), ["int64", "uint8"]),
        (lambda: as_dataset((X, Y + 1j)), ["labels", "complex"]),
        (lambda: as_dataset({"train": (X, Y)}), ["train and test"]),
        (lambda: as_dataset(iter([(X[0], 0)])), ["list_iterator", "map-style"]),
        (lambda: as_dataset((np.ma.masked_equal(X, X[0, 0, 0]), Y)), ["training", "masked"]),
        (lambda: as_dataset((X, Y), (X, np.ma.masked_equal(Y, 2))), ["test", "masked"]),
        (lambda: as_dataset([(X[0], 0), (np.ma.masked_equal(X[1], X[1, 0, 0]), 1)]), ["masked"]),
        (lambda: as_dataset([(X[0], 0), (X[1], np.ma.masked)]), ["masked"]),
        (lambda: as_dataset(([np.ma.masked_equal(each, each[0, 0]) for each in X], Y)), ["masked"]),
        (lambda: as_dataset((torch.tensor(X).to_sparse(), Y)), ["Sparse"]),
        (lambda: check_dataset(Dataset("d", np.ma.masked_equal(X, X[0, 0, 0]), Y, 3, 4), "data=d"), ["masked"]),
        (lambda: check_dataset(Dataset("d", X, np.ma.masked_equal(Y, 2), 3, 4), "data=d"), ["masked"]),
        (lambda: as_dataset((frame(a=[1]), [0])), ["training", "pflsim.Table"]),
        (lambda: as_dataset({"train": frame(a=[1]), "test": frame(a=[1])}), ["training", "pflsim.Table"]),
    ],
)
def test_other_objects_are_refused(make: Callable[[], Dataset], says: list[str]) -> None:
    with refusing(*says):
        make()


def test_warnings_about_data() -> None:
    data = digits()
    assert not dataset_warnings(data) and not dataset_warnings(digits(standardize=True))
    for scale, warned in ((1.0, True), (1 / 255, False), (-1.0, True)):
        found = dataset_warnings(as_dataset((X * np.float32(scale), Y)))
        assert ["data.standardize" in text for text in found] == [True] * warned
    assert not dataset_warnings(as_dataset((X.astype(float), Y), standardize=True))
    for labels, empty in (([1, 1, 2, 4, 0, 3], "2 of 5 classes"), ([1, 1, 2, 4, 3, 3], "begin at 1")):
        (text,) = dataset_warnings(Dataset("mine", X[:, None], np.array(labels), 5, 4))
        assert "0, 3" in text and empty in text and ("begin" in text) == ("begin" in empty)
    (huge,) = dataset_warnings(as_dataset((X * np.float32(1e30), Y)))
    assert "data.standardize" in huge


@pytest.mark.parametrize(
    ("train", "test", "values", "named"),
    [
        ([0, 1], [1, 2, 2], ("ant", "bee", "cat"), ["1 of 3", "cat", "2 test rows"]),
        ([0, 1], [0, 1], ("ant", "bee", "cat"), ["1 of 3", "cat"]),
        ([1, 1], [0, 1], (-1, 1), ["1 of 2", "-1", "1 test rows"]),
        ([0, 0], [0, 2], None, ["2 of 3", "1, 2", "1 test rows"]),
        ([0, 1], [2, 2], ("ant", "bee", "cat"), None),
        ([1, 1], [0, 0], (False, True), None),
    ],
)
def test_classes_of_the_test_part_only_are_named_or_refused(
    train: list[int], test: list[int], values: tuple[Any, ...] | None, named: list[str] | None
) -> None:
    x = np.arange(5, dtype=np.float32)[:, None]
    y, classes = np.array(train + test), len(values) if values else 3
    data = Dataset("zoo", x[: len(y)], y, classes, len(train), values=values)

    def load() -> Dataset:
        return data

    keep_object("zoo", load)
    settings = settings_of("data=digits", "method=fedavg", "clients=1", "partition=iid")
    settings = replace(settings, data={"_target_": "__main__.zoo"})
    if named is None:
        with refusing("zoo", str(values[test[0]] if values else test[0])):
            load_federation(settings)
    else:
        load_federation(settings)
        assert all(name in dataset_warnings(data)[0] for name in named)


@pytest.mark.parametrize(
    ("train", "test", "labels", "copied"),
    [
        ([1, 2, 3], [4, 5], None, 0),
        ([1, 2, 3], [3, 3, 5], None, 2),
        ([1, 1, 2], [4, 4], None, 0),
        ([1, 2], [1, 2], None, 2),
        ([1, 2], [1, 2], [0, 0, 1, 0], 1),
        ([1, 2], [1, 2], [0.5, 0.0, 0.5, 0.1], 1),
    ],
)
@pytest.mark.parametrize("kind", ["pictures", "table"])
def test_equal_rows_in_training_and_test_are_counted(
    tmp_path: Path, train: list[int], test: list[int], labels: list[float] | None, copied: int, kind: str
) -> None:
    """Rows are equal with their targets, whichever client has them; those of one part do not count."""
    values = np.array(train + test)
    y = np.zeros(len(values), np.int64) if labels is None else np.array(labels)
    y = y.astype(np.float32)[:, None] if labels and 0.5 in labels else y.astype(np.int64)
    x = values[:, None, None, None].astype(np.uint8) if kind == "pictures" else values[:, None].astype(np.float32)
    clients = np.arange(len(values)) % 2
    classes = 2 if y.ndim == 1 else 1
    data, rows = Dataset("d", x, y, classes, len(train), clients=clients), np.arange(len(values))

    def load() -> Dataset:
        return data

    keep_object("copies", load)
    first, last = rows[: len(train)], rows[len(train) :]
    assert copied_rows(data, Partition((first,), (rows[:0],), (last,))) == copied
    (tmp_path / "rows.json").write_text(json.dumps({"train": [[*range(len(train))]], "test": [[*range(len(test))]]}))
    words = ("clients=1", "partition=explicit", f"partition.path={tmp_path}/rows.json")
    settings = settings_of("data=digits", "method=fedavg", *words)
    found, _ = load_federation(replace(settings, data={"_target_": "__main__.copies"}))
    assert len(found.notes) == bool(copied) and (f"{copied} of {len(test)}" in " ".join(found.notes)) == bool(copied)


@pytest.mark.parametrize(
    ("y", "label"),
    [
        ([0.0, 1.0, 2.0, 0.0], "0 to 2, mean 0.75"),
        ([7, 9, 7, 7], "2 classes: 7 3, 9 1"),
        ([[1, 1], [0, 1], [1, 0], [0, 0]], "2 labels: 0 2, 1 2"),
    ],
)
def test_the_card_of_arrays(y: Any, label: str) -> None:
    card = dict(as_dataset((np.arange(8, dtype=np.float32).reshape(4, 2), np.array(y))).card.lines)
    assert card["label"] == label and card["inputs"].endswith("0 to 7")
