"""data=table: files and frames, the inputs made of their columns, and what a run chooses for them."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import inline, rounds, same, settings_of

import pflsim
from lightning_modules.contract.checks import states
from lightning_modules.prepare import prepare
from pflsim.config import components
from pflsim.data.dataset import Dataset
from pflsim.data.federate import load_federation
from pflsim.data.federated import Partition
from pflsim.data.sources.table import Encoder, Fitted
from pflsim.errors import SettingsError
from pflsim.records.files import valid

SMALL: dict[str, Any] = {"method": "fedavg", "rounds": 1, "executor": "inline", "progress": "none", "lr": 0.01}


def visits(n: int = 120) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    frame = pd.DataFrame(
        {
            "hospital": np.array(["Bern", "Oslo", "St. Mary, London"])[rng.integers(0, 3, n)],
            "age": rng.integers(20, 90, n).astype(float),
            "sex": np.array(["f", "m"])[rng.integers(0, 2, n)],
            "pressure": rng.normal(120, 20, n),
            "readmitted": np.array(["no", "yes"])[rng.integers(0, 2, n)],
        }
    )
    frame.loc[3, "age"], frame.loc[4, "sex"] = np.nan, None
    return frame


@pytest.fixture(autouse=True)
def file(here: Path) -> None:
    visits().to_csv("visits.csv", index=False)


def federation(*words: str) -> tuple[Dataset, Partition, Any]:
    settings = settings_of("data=table", *words, "method=fedavg")
    return *load_federation(settings), settings


def table(frame: pd.DataFrame, *test: pd.DataFrame, **more: Any) -> pflsim.Table:
    return pflsim.Table(frame, *test, label="readmitted", client="hospital", **more)


OF_CLIENTS = ("data.path=visits.csv", "data.label=readmitted", "data.client=hospital")


def by_hand(frame: pd.DataFrame, train: np.ndarray) -> np.ndarray:
    """Columns age, pressure, sex=f, sex=m of all rows, by statistics of the training rows."""
    columns = []
    for name in ("age", "pressure"):
        values = frame[name].to_numpy().copy()
        values[np.isnan(values)] = np.nanmean(values[train])
        columns.append((values - values[train].mean()) / values[train].std())
    sex = frame["sex"].to_numpy(dtype=object).copy()
    known = [value for value in sex[train] if isinstance(value, str)]
    sex[[not isinstance(value, str) for value in sex]] = max("fm", key=known.count)
    return np.stack([*columns, sex == "f", sex == "m"], axis=1).astype(np.float32)


@pytest.mark.parametrize("fit", ["all", "client"])
def test_inputs_are_those_of_the_training_rows(fit: str) -> None:
    dataset, partition, settings = federation(*OF_CLIENTS, f"data.fit={fit}")
    assert (settings.clients, settings.names["partition"], settings.names["split"]) == (3, "by_client", "merged")
    assert settings.names["model"] == "tabular_mlp" and partition.names == ("Bern", "Oslo", "St. Mary, London")
    frame = visits()
    for client, name in enumerate(partition.names):
        parts = [split[client] for split in (partition.train, partition.val, partition.test)]
        rows = np.concatenate(parts)
        assert {*rows} == {*np.flatnonzero(frame["hospital"] == name)} and len(parts[2]) == round(len(rows) / 4)
        train = np.concatenate(partition.train) if fit == "all" else parts[0]
        assert np.allclose(dataset.x[rows], by_hand(frame, train)[rows], atol=1e-5)
    assert dataset.y.tolist() == (frame["readmitted"] == "yes").astype(int).tolist()


@pytest.mark.parametrize("without", [(), ("age", "pressure"), ("sex", "ward")], ids=str)
def test_inputs_are_those_of_scikit_learn_also_after_a_file(
    without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = visits().assign(ward=[*[None] * 90, *"xyz" * 10]).drop(columns=[*without])
    rows, of = frame.iloc[:90].assign(**{} if without else {"age": np.nan}), Fitted.of
    numbers, texts = ([name for name in names if name in frame] for names in (("age", "pressure"), ("ward", "sex")))
    encoder = Encoder(numbers, texts, ["m"])
    monkeypatch.setattr(Fitted, "of", lambda transformer: transformer)
    transformer: Any = encoder.fit(encoder.columns(rows))
    saved = json.dumps(asdict(replace(encoder, fitted=[of(transformer)])))
    found = valid(Encoder, json.loads(saved))(frame)
    expected = np.asarray(transformer.transform(encoder.columns(frame)), np.float32)
    assert found.dtype == expected.dtype and np.array_equal(found, expected)


def test_clients_that_are_held_out_by_name_are_the_last_ones_and_keep_their_rows() -> None:
    _, before, _ = federation(*OF_CLIENTS, "shift=permuted_labels", "seed=3")
    _, after, settings = federation(
        *OF_CLIENTS, "shift=permuted_labels", "seed=3", "eval.holdout_clients=['St. Mary, London',Bern]"
    )
    assert before.names == ("Bern", "Oslo", "St. Mary, London") and settings.trained == 1
    assert after.names == ("Oslo", "Bern", "St. Mary, London")
    for client, number in enumerate((1, 0, 2)):
        for split in ("train", "val", "test"):
            assert np.array_equal(getattr(after, split)[client], getattr(before, split)[number])
        assert after.shift.groups[client] == before.shift.groups[number]


@pytest.mark.parametrize("label", ["readmitted", "pressure"])
def test_rows_of_a_client_that_is_held_out_change_no_trained_tensor(label: str) -> None:
    held, frame = visits()["hospital"] == "Bern", visits()
    frame.loc[held, ["age", "sex", "readmitted"]] = [300.0, "x", "yes"]
    frame.loc[held, "pressure"] *= 5
    frame.to_csv("other.csv", index=False)
    more = ("task.class_weights=balanced", "task.loss=CrossEntropyLoss") if label == "readmitted" else ()
    for fit in ("training", "all"):
        found = []
        for path in ("visits.csv", "other.csv"):
            words = (f"data.path={path}", f"data.label={label}", "data.client=hospital", f"eval.fit={fit}", *more)
            made = prepare(settings_of("data=table", *words, "eval.holdout_clients=[Bern]", "method=fedavg", "lr=0.01"))
            executor = inline(made)
            rounds(executor, 1, made.plan.clients)
            found.append({client: state for client, state in states(executor).items() if client < made.plan.clients})
        assert same(*found) == (fit == "training") and len(found[0]) == 2


@pytest.mark.slow
def test_a_client_with_a_number_for_a_name_is_found_by_it() -> None:
    frame = visits()
    frame["hospital"] = frame["hospital"].map({name: i + 1 for i, name in enumerate(sorted({*frame["hospital"]}))})
    run = pflsim.run(data=table(frame), run_dir="run", **SMALL)
    assert [path.name for path in pflsim.export(run, client=1)] == ["client_1.pt2"]
    first = pflsim.load_model(run, client=1)
    assert first.about["client"] == pflsim.load_model(run, client="1").about["client"] == 0
    with pytest.raises(SettingsError, match="client 0"):
        pflsim.load_model(run, client=0)


def test_clients_are_compared_as_text() -> None:
    frame = visits(60).assign(hospital=[1, "1", "2", 2.0, "b ", "b"] * 10)
    partition = pflsim.partition("mixed", data=table(frame))
    assert partition.names == ("1", "2", "b")
    for client, name in enumerate(partition.names):
        rows = np.concatenate([split[client] for split in (partition.train, partition.val, partition.test)])
        assert {str(value).strip()[0] for value in frame["hospital"].iloc[rows]} == {name} and len(rows) == 20


def test_the_order_of_rows_changes_nothing_but_their_numbers() -> None:
    dataset, partition, _ = federation(*OF_CLIENTS)
    order = np.random.default_rng(0).permutation(120)
    visits().iloc[order].to_csv("other.csv", index=False)
    other, again, _ = federation("data.path=other.csv", *OF_CLIENTS[1:])
    for one, two in zip(partition.train, again.train, strict=True):
        assert {*one} == {*order[two]}
        assert np.allclose(dataset.x[np.sort(one)], other.x[np.argsort(order)[np.sort(one)]], atol=1e-6)


COUNTS = ("split.train=9", "split.test=9")


@pytest.mark.slow
def test_what_is_given_stays() -> None:
    _, _, settings = federation(*OF_CLIENTS, "model=linear", "partition=iid", "split=counts", "clients=4", *COUNTS)
    assert (settings.clients, settings.model["hidden"], settings.split["train"]) == (4, [], 9)
    with pytest.raises(SettingsError, match="clients=5.* 3 values"):
        federation(*OF_CLIENTS, "clients=5")
    assert federation(*OF_CLIENTS, "clients=2", "partition.ids_per_client=1")[2].clients == 2
    assert federation(*OF_CLIENTS[:2], "clients=7", "partition=iid")[2].names["split"] == "merged"


def test_rows_without_a_label_and_small_clients_are_left_out_and_named() -> None:
    frame = visits()
    frame.loc[[0, 1], "readmitted"] = None
    frame.loc[2, "hospital"] = None
    frame = pd.concat([frame, frame.iloc[:5].assign(hospital="Tiny")[2:]], ignore_index=True)
    frame.to_csv("visits.csv", index=False)
    dataset, partition, settings = federation(*OF_CLIENTS)
    assert settings.clients == 3 and len(dataset.y) == 117 and "Tiny" not in partition.names
    notes = " ".join(dataset.notes)
    assert "2 rows without a label" in notes and "1 rows without a client" in notes and "Tiny (3)" in notes
    assert "Tiny" in federation(*OF_CLIENTS, "data.min_examples=3")[1].names


def test_two_tables_are_joined_by_the_names_of_columns() -> None:
    frame = visits()
    test = frame.iloc[80:][["sex", "pressure", "hospital", "readmitted", "age"]].assign(more=1)
    words = [f"data.{key}={value}" for key, value in table(frame.iloc[:80], test).settings().items()]
    dataset, partition, settings = federation(*words)
    assert settings.split["test_by"] == "clients" and settings.names["split"] == "official" and settings.clients == 3
    train = np.concatenate(partition.train)
    assert train.max() < 80 and np.allclose(dataset.x, by_hand(frame, train), atol=1e-5)
    for client, name in enumerate(partition.names):
        assert {*partition.test[client]} == {*80 + np.flatnonzero(test["hospital"] == name)}
    missing = table(frame.iloc[:80], test[test["hospital"] != name])
    with pytest.raises(SettingsError, match=rf"split\.test_by=clients: client {name} "):
        federation(*[f"data.{key}={value}" for key, value in missing.settings().items()])


def test_numbers_that_are_categories_and_chosen_features() -> None:
    frame = pd.DataFrame({"site": [1, 2, 3, 1] * 5, "n": np.arange(20), "t": pd.to_datetime("2026-01-01")})
    frame.assign(y=[0, 1] * 10).to_csv("t.csv", index=False)
    words = ("data.path=t.csv", "data.label=y", "partition=iid", "clients=2", "data.categorical=[site]")
    dataset, _, _ = federation(*words, "data.features=[site]")
    assert np.array_equal(dataset.x, np.eye(3, dtype=np.float32)[frame["site"] - 1])
    with pytest.raises(SettingsError, match="'sight'.*site"):
        federation(*words, "data.features=[sight]")
    with pytest.raises(SettingsError, match="'t'"):
        federation("data.label=n", f"data.path={components.keep_object('t', frame)}", "partition=iid")


@pytest.mark.slow
def test_a_run_of_a_frame_and_its_model(here: Path) -> None:
    frame = visits()
    run = pflsim.run(data=table(frame, name="visits"), run_dir="run", **SMALL)
    assert run.summary["data"] == "visits" and {*run.per_client()["name"]} == {*frame["hospital"]}
    rows = run.per_client()
    oslo = rows[(rows["name"] == "Oslo") & (rows["split"] == "test") & (rows["model"] == run.reported.model)].iloc[-1]
    page = pflsim.report(run, here / "report.html").read_text()
    cells = re.search(r'<th scope="row">Oslo</th>(.*?)</tr>', page).group(1)
    assert re.findall(r">([\d.]+)[< ]", cells) == [str(oslo["total"]), f"{oslo['correct'] / oslo['total']:.3f}"]
    model = pflsim.load_model(run, client="Oslo")
    train = np.concatenate(json.loads(Path("run/partition.json").read_text())["train"])
    asked = frame.iloc[[7, 8]].assign(sex=["f", "x"])[["sex", "pressure", "age"]]
    expected = by_hand(frame, train)[[7, 8]]
    expected[:, 2:] = [[1, 0], [0, 0]]  # a category that no training row has
    with torch.no_grad():
        assert torch.allclose(model(asked), model(torch.from_numpy(expected)), atol=1e-5)
    with pytest.raises(SettingsError, match="two columns have the name 'age'"):
        pflsim.partition("twice", data=pflsim.Table(pd.concat([frame, frame[["age"]]], axis=1), label="readmitted"))
    for wrong in ({"label": "readmited"}, {"label": "readmitted", "client": "city"}):
        with pytest.raises(SettingsError, match="^data=Table has no column"):
            pflsim.partition("wrong", data=pflsim.Table(frame, **wrong))
    with pytest.raises(SettingsError, match="'pressure'.*infinite"):
        model(asked.assign(pressure=np.inf))
    with pytest.raises(SettingsError, match="'pressure'"):
        model(asked.drop(columns="pressure"))
    assert pflsim.resume(run, rounds=2, data=table(frame, name="visits")).done == 2
    with pytest.raises(SettingsError, match="order_of_examples"):
        pflsim.resume(run, rounds=3, data=table(frame.sample(frac=1, random_state=0), name="visits"))


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["data.label=readmitted"], "data.path"),
        (["data.path=visits.csv"], "data.label"),
        (["data.path=no.csv", "data.label=readmitted"], "data.path=no.csv"),
        (["data.path=visits.csv", "data.label=readmited"], "'readmited'.*readmitted"),
        ([*OF_CLIENTS[:2], "data.client=city"], "'city'"),
        ([*OF_CLIENTS, "data.features=[hospital]"], "data.features"),
        ([*OF_CLIENTS, "data.min_examples=100"], "no rows are left"),
        ([*OF_CLIENTS, "eval.holdout_clients=[Bonn]"], r"eval.holdout_clients.*'Bonn'.*Bern.*'St. Mary, London'"),
        ([*OF_CLIENTS[:2], "partition=iid", "clients=3", "eval.holdout_clients=[0]"], "holdout_clients.*'0'.*names"),
    ],
)
def test_wrong_tables_are_refused(words: list[str], names: str) -> None:
    with pytest.raises(SettingsError, match=names):
        federation(*words)
