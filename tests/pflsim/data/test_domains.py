"""data=domains: images of several sources in one shape, and partitions within each domain."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import refusing, settings_of

import pflsim
from pflsim.cli import main
from pflsim.data.dataset import Dataset
from pflsim.data.federate import load_federation
from pflsim.data.federated import Partition
from pflsim.data.sources import domains

GREY = ("data.sources=[dark.npz,bright.npz,digits]", "data.size=8", "data.grayscale=true")


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    rng = np.random.default_rng(0)
    for name, low, shape in (("dark", 0, (4, 4)), ("bright", 200, (6, 6, 3))):
        x, y = rng.integers(low, low + 50, (80, *shape)).astype(np.uint8), np.arange(80) % 4
        np.savez(f"{name}.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])


def federation(*words: str) -> tuple[Dataset, Partition]:
    return load_federation(settings_of("data=domains", "method=fedavg", *words))


@pytest.mark.parametrize("split", ["official", "merged"])
def test_clients_have_examples_of_one_domain_each(split: str) -> None:
    words = (*GREY, "clients=7", "partition=dirichlet", "partition.alpha=1", "partition.min_examples=4")
    dataset, partition = federation(*words, f"split={split}")
    assert dataset.clients is not None and dataset.x.shape[1:] == (1, 8, 8) and dataset.train_size == 60 + 60 + 1438
    domains = ["dark", "bright", "digits"]
    assert partition.names == ("dark-0", "dark-1", "dark-2", "bright-0", "bright-1", "digits-0", "digits-1")
    for client, name in enumerate(partition.names):
        for rows in (partition.train[client], partition.val[client], partition.test[client]):
            assert {domains[number] for number in dataset.clients[rows]} == {name.partition("-")[0]}
    used = np.concatenate([*partition.train, *partition.val, *partition.test])
    assert len({*used}) == len(used) and (split == "official" or len(used) == len(dataset.y))
    assert dataset.x[dataset.clients == 0].max() < 50 and dataset.x[dataset.clients == 1].min() >= 200
    assert dataset.x[dataset.clients == 2].max() == 255, "grey levels 0 to 16 of digits"


def test_domains_are_dealt_independently() -> None:
    """Two domains with equal examples have other shares of the classes."""
    np.savez("copy.npz", **np.load("dark.npz"))
    words = ("clients=4", "partition=dirichlet", "partition.alpha=1", "partition.min_examples=4")
    dataset, partition = federation("data.sources=[dark.npz,copy.npz]", *words)
    assert dataset.x.shape[1:] == (3, 32, 32)
    shares = [np.bincount(dataset.y[partition.train[client]], minlength=4).tolist() for client in (0, 2)]
    assert shares[0] != shares[1]
    with refusing("eval.holdout_partition", "domains"):
        more = "eval.holdout_clients=1", "eval.holdout_partition={alpha: 2}"
        federation("data.sources=[dark.npz,copy.npz]", *words, *more)


def test_the_number_of_clients_of_each_domain_and_settings_of_a_source() -> None:
    sources = "data.sources=[{npz: {path: dark.npz}},{digits: {standardize: true}}]"
    dataset, partition = federation(sources, "data.clients=[1,4]", "data.size=8", "clients=5", "partition=iid")
    assert dataset.mean is None and [name.partition("-")[0] for name in partition.names] == ["dark"] + ["digits"] * 4


@pytest.mark.slow
def test_a_run_shows_the_mean_of_each_domain(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*GREY, "data=domains", "clients=4", "method=local", "rounds=1", "partition=iid", "model=mlp"]
    assert main([*words, "executor=inline", "run_dir=run"]) == 0
    printed = capsys.readouterr().out
    run = pflsim.load("run")[0]
    with Path("run/per_client.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["round"] == "1" and row["split"] == "test"]
    found = {row["name"]: int(row["correct"]) / int(row["total"]) for row in rows if row["phase"] == "trained"}
    assert [*found] == ["dark-0", "dark-1", "bright-0", "digits-0"]
    means = run.summary["domains"]["personal"]["last"]["mean"]  # type: ignore[typeddict-item]
    assert means == pytest.approx({"dark": (found["dark-0"] + found["dark-1"]) / 2, "bright": found["bright-0"],
                                   "digits": found["digits-0"]})  # fmt: skip
    assert f"digits {found['digits-0']:.4f}" in printed and run.summary["data"] == "dark+bright+digits"


def source(folder: str, values: list[int], names: str | None) -> dict[str, Any] | str:
    """Images of one grey level for each class: a folder with its classes by name, or an archive of numbers."""
    images = [np.full((4, 4), 10 * value, np.uint8) for value in values]
    if names is None:
        y = np.arange(len(values))
        np.savez(f"{folder}.npz", x_train=images, y_train=y, x_test=images, y_test=y)
        return f"{folder}.npz"
    for name, image in zip(names.split(), images, strict=True):
        for part in ("train", "test"):
            Path(folder, part, name).mkdir(parents=True)
            Image.fromarray(image).save(f"{folder}/{part}/{name}/1.png")
    return {"image_folder": {"root": folder}}


@pytest.mark.parametrize(
    ("one", "two", "levels", "lacking"),
    [
        (("cat dog eel", [1, 2, 3]), ("cat eel", [1, 3]), ["cat", "dog", "eel"], ["two lacks dog"]),
        (("cat eel", [1, 3]), ("dog eel", [2, 3]), ["cat", "dog", "eel"], ["one lacks dog", "two lacks cat"]),
        (("b", [2]), ("a", [1]), ["a", "b"], ["one lacks a", "two lacks b"]),
        (("cat dog", [1, 2]), ("cat dog", [1, 2]), ["cat", "dog"], []),
        (("10 9", [1, 2]), ("10 9", [1, 2]), ["10", "9"], []),
        (("cafe\u0301 tea", [1, 2]), ("caf\u00e9 tea", [1, 2]), ["caf\u00e9", "tea"], []),
        ((None, [1, 2]), (None, [1, 2, 3]), None, ["one lacks 2"]),
        ((None, [1, 2]), ("cat dog", [1, 2]), ["cat", "dog"], []),
        ((None, [1, 2]), ("01 1", [1, 2]), ["01", "1"], []),
        ((None, [1, 2, 3]), ("0 10 2", [1, 4, 3]), [0, 1, 2, 10], ["one lacks 10", "two lacks 1"]),
    ],
    ids=str,
)
def test_classes_of_folders_are_joined_by_name(
    one: Any, two: Any, levels: list[Any] | None, lacking: list[str]
) -> None:
    """In every source, the grey level is ten times the number of the class, from 1."""
    sources = [source(name, level, names) for name, (names, level) in (("one", one), ("two", two))]
    data = domains.load(sources=sources, clients=2, size=4)  # type: ignore[arg-type]
    assert data.x[:, 0, 0, 0].tolist() == (10 * data.y + 10).tolist() and data.values == (levels and tuple(levels))
    assert [name for name in lacking if name in " ".join(data.notes)] == lacking and len(data.notes) == bool(lacking)


@pytest.mark.parametrize("names", [["a b", None], ["a b", "a c", None]])
def test_names_and_numbers_that_do_not_fit_are_refused(names: list[str | None]) -> None:
    """Numbers are those of the only list of names, if there are equally many."""
    levels = [[1, 2], [1, 2]] if len(names) == 3 else [[1, 2]]
    sources = [source(f"s{i}", level, name) for i, (name, level) in enumerate(zip(names, levels, strict=False))]
    last = source("last", [1, 2, 3] if len(names) == 2 else [1, 2], None)
    with refusing("data.sources", "last"):
        domains.load(sources=[*sources, last])  # type: ignore[list-item]


def test_one_hot_targets_and_a_fourth_channel() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (12, 5, 5, 4)).astype(np.uint8), np.eye(3, dtype=np.uint8)[np.arange(12) % 3]
    np.savez("hot.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    data = domains.load(sources=["hot.npz"], clients=1, size=4)
    assert data.y[:4].tolist() == [0, 1, 2, 0] and any("channel" in note for note in data.notes)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ((), "data.sources"),
        (("data.sources=[dark.npz,dark.npz]",), "data.sources"),
        (("data.sources=[dark.npz,wine]",), "wine"),
        ((*GREY, "data.clients=[1,1]"), "data.clients"),
        ((*GREY, "data.clients=[1,1,1]"), "clients=6"),
        (("data.sources=[{digits: {colour: 1}}]",), "colour"),
    ],
)
def test_wrong_domains_are_refused(words: tuple[str, ...], names: str, refused: Callable[..., str]) -> None:
    assert names in refused("data=domains", "method=fedavg", "clients=6", "executor=inline", *words)
