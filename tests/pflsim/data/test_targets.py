"""What targets are found to be, and what a run may ask for instead."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from support import events

import pflsim
from pflsim.data.content import partition_hash, row_digests
from pflsim.data.dataset import Dataset, check_dataset
from pflsim.data.federate import federate
from pflsim.data.federated import Partition, class_counts, shard
from pflsim.data.partitions import dirichlet
from pflsim.data.sources import npz
from pflsim.data.sources.own import as_dataset
from pflsim.data.splits import merged
from pflsim.data.targets import as_task
from pflsim.errors import SettingsError
from pflsim.records.per_client import complete_rounds
from pflsim.records.trace import read_matrices

X = np.arange(8, dtype=np.float32).reshape(4, 2)
MATRIX = [[0, 1], [1, 1], [0, 0], [0, 1]]


@pytest.mark.parametrize(
    ("labels", "task", "y"),
    [
        (["b", "a", "b", "a"], "classification", [1, 0, 1, 0]),
        ([True, False, True, False], "classification", [1, 0, 1, 0]),
        ([1.0, 0.0, 1.0, 0.0], "classification", [1, 0, 1, 0]),
        ([0.5, 2.0, 3.0, 0.0], "regression", [[0.5], [2.0], [3.0], [0.0]]),
        ([[1.5, 2], [3, 4], [5, 6], [7, 8]], "regression", [[1.5, 2], [3, 4], [5, 6], [7, 8]]),
        (MATRIX, "multilabel", MATRIX),
    ],
    ids=str,
)
def test_the_task_is_found(labels: list[Any], task: str, y: list[Any]) -> None:
    data = as_dataset((X, np.array(labels)))
    check_dataset(data, "mine")
    assert (data.task, data.y.tolist()) == (task, y)
    assert as_task(data, "auto") is data


def test_many_integers_or_texts_in_a_table_need_a_task() -> None:
    x, y = np.zeros((25, 3), np.float32), np.arange(3, 28)
    data = as_dataset((x, y))
    with pytest.raises(SettingsError, match=r"25 values.*task=regression"):
        as_task(data, "auto")
    assert as_task(data, "classification").num_classes == 25
    assert as_task(data, "regression").y[:, 0].tolist() == y.tolist(), "the numbers of the data"
    assert as_task(as_dataset((np.zeros((25, 4, 4)), y)), "auto").num_classes == 25, "images"
    assert as_task(Dataset("d", x, y - 3, 25, 20), "auto").num_classes == 25, "the data set says so"
    text = as_dataset((x, (y / 7).astype(str)))
    with pytest.raises(SettingsError, match="25 values"):
        as_task(text, "auto")
    assert as_task(text, "classification").num_classes == 25


def test_other_tasks_on_request() -> None:
    classes = as_dataset((X, np.array([2, 0, 1, 1])))
    assert as_task(classes, "multilabel").y.tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 1, 0]]
    values = as_dataset((X, np.array([0.5, 2, 3, 0.5])))
    assert as_task(values, "classification").y.tolist() == [0, 1, 2, 0]
    assert as_task(as_dataset((X, np.array(MATRIX))), "regression").y.dtype == np.float32
    for data, task in ((as_dataset((X, np.array(["a", "b", "a", "b"]))), "regression"), (values, "multilabel")):
        with pytest.raises(SettingsError, match=f"task={task}"):
            as_task(data, task)  # type: ignore[arg-type]


ONE_HOT = np.eye(3, dtype=np.int64)[[2, 0, 1, 1]]


@pytest.mark.parametrize(
    ("y", "asked", "task", "expected"),
    [
        (ONE_HOT, "auto", "classification", [2, 0, 1, 1]),
        (ONE_HOT, "classification", "classification", [2, 0, 1, 1]),
        (ONE_HOT.astype(np.float32), "auto", "classification", [2, 0, 1, 1]),
        (ONE_HOT == 1, "classification", "classification", [2, 0, 1, 1]),
        (pandas.get_dummies([2, 0, 1, 1]), "auto", "classification", [2, 0, 1, 1]),
        (ONE_HOT[:, [0, 1, 2, 2]] * [1, 1, 1, 0], "auto", "classification", [2, 0, 1, 1]),
        (np.eye(2, dtype=np.uint8)[[0, 1, 1, 0]], "auto", "classification", [0, 1, 1, 0]),
        (ONE_HOT, "multilabel", "multilabel", ONE_HOT.tolist()),
        (ONE_HOT, "regression", "regression", ONE_HOT.tolist()),
        (ONE_HOT | [0, 0, 1], "auto", "multilabel", (ONE_HOT | [0, 0, 1]).tolist()),
        (ONE_HOT * [[1], [1], [1], [0]], "auto", "multilabel", [*ONE_HOT[:3].tolist(), [0, 0, 0]]),
    ],
    ids=str,
)  # fmt: skip
def test_one_hot_targets_are_classes(y: Any, asked: Any, task: str, expected: list[Any]) -> None:
    """The line about it is for those who did not ask."""
    data = as_dataset((X, y))
    found = as_task(data, asked)
    check_dataset(found, "mine")
    assert (found.task, found.y.tolist()) == (task, expected) and found.num_classes == np.shape(y)[1]
    assert (len(found.notes) > 0) == (asked == "auto" and task == "classification")


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_npz_files_have_any_targets(task: str, tmp_path: Path) -> None:
    y = np.arange(6) / 2 if task == "regression" else np.eye(3, dtype=np.uint8)[np.arange(6) % 3]
    np.savez(tmp_path / "mine.npz", x_train=np.zeros((6, 2)), y_train=y, x_test=np.zeros((4, 2)), y_test=y[:4])
    data = npz.load(path=str(tmp_path / "mine.npz"))
    assert data.task == task and np.array_equal(data.y.squeeze(), [*y, *y[:4]])


def regression(n: int = 400) -> Dataset:
    rng = np.random.default_rng(0)
    return Dataset("values", rng.normal(size=(n, 3)).astype(np.float32), rng.gamma(1, 1, (n, 1)).astype("f4"), 1, n)


@pytest.mark.parametrize("bins", [4, 10])
def test_partitions_by_labels_use_quantiles(bins: int) -> None:
    """Each bin has the same number of examples; clients differ in their targets, and tests follow their client."""
    data = regression()
    by_class = data.by_class(bins)
    assert np.bincount(by_class.y).tolist() == [400 // bins] * bins
    order = np.argsort(data.y[:, 0])
    assert (np.diff(by_class.y[order]) >= 0).all()
    made = federate(by_class, lambda *given: dirichlet(*given, alpha=0.1), merged, 4, 0)  # type: ignore[arg-type]
    means = [(data.y[train].mean(), data.y[test].mean()) for train, test in zip(made.train, made.test, strict=True)]
    assert np.ptp([train for train, _ in means]) > 1 and np.corrcoef(np.array(means).T)[0, 1] > 0.9
    assert class_counts(data, made, "train").shape == (4, 10)
    assert shard(data, made, 1).train.y.tolist() == data.y[made.train[1]].tolist()


def test_labels_are_dealt_by_the_first_one() -> None:
    assert as_dataset((X, np.array(MATRIX))).by_class().y.tolist() == [1, 0, 2, 1]


def test_the_content_of_targets_counts() -> None:
    data = regression(20)
    rows = np.arange(20)
    part = Partition((rows,), (rows[:0],), (rows[:0],))
    changed = Dataset("values", data.x, data.y + (rows == 3)[:, None].astype("f4"), 1, 20)
    assert partition_hash(data, part) != partition_hash(changed, part)
    assert (row_digests(data) != row_digests(changed)).any(1).tolist() == (rows == 3).tolist()


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.full((4, 1), np.nan, np.float32), "finite"),
        (np.full((4, 2), 3), "0 or 1"),
        (np.zeros((4, 3), np.float32), "2 columns"),
        (np.zeros((4, 2)), "float32"),
    ],
    ids=["nan", "labels", "columns", "type"],
)
def test_wrong_targets_are_refused(y: np.ndarray, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        check_dataset(Dataset("d", X, y, 2 if y.shape[1] > 1 else 1, 4), "d")


HOSPITALS = ("Bern", "Oslo", "St. Mary, London")
SMALL: dict[str, Any] = {
    "clients": 3, "partition": "by_client", "split": "merged", "model": "tabular_mlp", "rounds": 1,
    "executor": "inline", "progress": "none", "tracking": {"per_client": True},
}  # fmt: skip


def visits() -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(0, 2, 60)
    return Dataset("visits", x, y, 2, 60, clients=np.array(HOSPITALS)[rng.permutation(60) % 3], values=("no", "yes"))


def test_every_output_names_the_clients(here: Path) -> None:
    run = pflsim.run(method="fedamp", data=visits(), run_dir="run", **SMALL)
    with Path("run/per_client.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["client"], row["name"]) for row in rows} == {*zip("012", HOSPITALS, strict=True)}
    assert {*run.per_client()["name"]} == {*HOSPITALS} and len(complete_rounds(Path("run"))) == 1
    assert any(tag.startswith("client/St. Mary, London/") for tag in events(Path("run")).Tags()["scalars"])
    matrices = read_matrices(Path("run"))
    assert matrices and {m.rows.names for m in matrices.matrices if m.rows.label == "receiver"} == {HOSPITALS}
    page = pflsim.report(run).read_text()
    assert page.count("St. Mary, London") >= 2, "in the table of clients and in the data"
    assert ">no</text>" in page and ">yes</text>" in page
    assert pflsim.load_model(run, client="Oslo").about["client"] == 1
    with pytest.raises(SettingsError, match="Osla.*Oslo"):
        pflsim.load_model(run, client="Osla")
