"""The functions of `pflsim`, as a script or a notebook calls them."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import refusing, settings_of
from torch import nn

import pflsim
from lightning_modules.base import ClientModule
from pflsim.commands.overrides import values_of
from pflsim.config import components
from pflsim.config.components import resolve, target_of
from pflsim.config.compose import Several, parse, sweep
from pflsim.config.names import as_value
from pflsim.errors import SettingsError
from pflsim.participation import Participation
from pflsim.seeding import cohort

pytestmark = pytest.mark.usefixtures("here")
SMALL: dict[str, Any] = {"data": "digits", "clients": 3, "rounds": 2, "executor": "inline", "lockstep": False}
SMALL |= {"progress": "none"}


TEXTS = ["auto", "a b", "it's", "'", "\\'", "a=b,c", "x{y}", "0.1", "true", "null", "[1]"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_stays_text(text: str) -> None:
    """In a setting, in a list and in a dict; also as it can be pasted to the command line."""
    given = {"head": text, "freeze": [text], "lora": {"key": text, "other": [{"key": text}]}}
    found = settings_of("data=digits", **given)
    assert (found.head, found.freeze, found.lora) == (text, [text], given["lora"])
    assert parse([f"head={as_value(text)}"]) == {"head": text}


def test_a_number_as_text_is_refused() -> None:
    with refusing("lr='0.1'", "number"):
        settings_of(lr="0.1")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1), (1e-5, 1e-5), (True, True), (None, None), ((1, [2.5]), [1, [2.5]]), ([], []), (Path("/a b"), "/a b"),
     (np.float64(0.1), 0.1), (np.int64(3), 3), (np.arange(2), [0, 1])],
)  # fmt: skip
def test_values_are_those_of_a_config_file(value: Any, expected: Any) -> None:
    found = values_of({"key": {"of": value}})
    assert found == {"key.of": expected} and type(found["key.of"]) is type(expected)


def test_sections_and_sweeps() -> None:
    assert values_of({"eval": {"received": True, "every": 2}}) == {"eval.received": True, "eval.every": 2}
    swept = values_of({"seed": [0, 1], "method": ["local", "ditto"], "lr": [1]}, sweep=True)
    assert swept == {"seed": [0, 1], "method": ["local", "ditto"], "lr": 1}
    assert {key for key, value in swept.items() if isinstance(value, Several)} == {"seed", "method"}
    assert values_of({"trace": {"rounds": [1]}}, sweep=True) == {"trace.rounds": [1]}
    named = {"method": {"name": "ditto", "lam": 0.5}, "split": {"validation": 0}}
    assert values_of(named) == {"method": "ditto", "method.lam": 0.5, "split.validation": 0}
    assert values_of({"method": {"name": "ditto"}, "lr": np.float32(0.1)}) == {"method": "ditto", "lr": 0.1}
    assert values_of({"seed": range(2), "model.hidden": [range(4, 6)]}, sweep=True) == {
        "seed": [0, 1], "model.hidden": [4, 5],
    }  # fmt: skip
    with refusing("lr"):
        settings_of(**values_of({"lr": np.ndarray}))
    for last in ("fedadam", "fedyogi"):
        given = {"method": "ditto+fedadam", "server_optimizer": last}
        assert settings_of(**given).names["server_optimizer"] == last
    parts = values_of({"split": [{"validation": 0}, {"validation": 0.5}]}, sweep=True)
    assert [settings_of(**job).split["validation"] for job in sweep(parts)] == [0, 0.5]
    assert parse(["method=glob(fedpr*)", "seed=range(2)"]) == {"method": ["fedproto", "fedprox"], "seed": [0, 1]}
    with refusing("seed"):
        values_of({"seed": [1, 1]}, sweep=True)
    with refusing("split"):
        values_of({"split": [{"validation": 0}, {"stratify": True}]}, sweep=True)
    with refusing("model"):
        values_of({"model": 3})


def test_importable_objects_keep_their_names() -> None:
    from lightning_modules.methods.fedavg import FedAvg

    def local() -> None: ...

    assert target_of(FedAvg) == "lightning_modules.methods.fedavg.FedAvg"
    assert target_of(local) == "__main__.local" and resolve("__main__.local") is local


def test_a_run_and_its_tables() -> None:
    run = pflsim.run(method="fedavg", **SMALL, overrides=["model.hidden=[4]"], eval={"received": True}, run_dir="one")
    assert run.folder == Path("one") and run.config["eval"]["received"] is True and run.config["model"]["hidden"] == [4]
    with Path("one/per_client.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = run.per_client()
    assert len(table) == len(rows) and list(table["correct"]) == [int(row["correct"]) for row in rows]
    assert {*table["method"]} == {"fedavg"} and {*table["seed"]} == {run.seed} and {*table["name"]} == {*"012"}
    models = table[["model", "phase", "reported"]].drop_duplicates().to_numpy().tolist()
    assert [model for *model, reported in models if reported] == [["global", "received"]] and len(models) > 1
    last = [row for row in rows if (row["round"], row["split"], row["model"]) == ("2", "test", "global")]
    assert run.accuracy == pytest.approx(sum(int(row["correct"]) / int(row["total"]) for row in last) / 3)
    assert list(run.metrics()["round"]) == [1, 2] and run.metrics()["losses.ce"].notna().all()
    assert "fedavg" in repr(run) and f"{run.accuracy:.4g}" in pflsim.load("one")._repr_html_()
    assert pflsim.compare(run)[0].runs == [run]
    with pytest.raises(SettingsError, match="runs="):
        pflsim.compare([])
    (again,) = pflsim.load("one")
    assert again.accuracy == run.accuracy and run.trusted and not again.trusted


def test_drawn_participants_are_those_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    """Each client alone with a probability: rounds may be empty, and the last round has all clients."""
    settings: Any = {**SMALL, "rounds": 5, "fraction": 0.2, "method": "local", "progress": "plain"}
    how: dict[str, Any] = {"sampling": "poisson", "last": "sampled"}
    run = pflsim.run(**settings, participation=how, eval={"clients": "participants"}, seed=4, run_dir="one")
    drawn = [cohort(4, t, 3, 0.2, Participation(**how)) for t in range(1, 6)]
    assert [line.cohort for line in run.history] == [*map(len, drawn)] and () in drawn
    assert [bool(line.evaluations) for line in run.history] == [*map(bool, drawn)]
    left = {*range(3)}.difference(*drawn)
    assert run.untrained(5) == left and (f"not trained  {len(left)} client" in capsys.readouterr().out) == bool(left)
    run = pflsim.run(**settings, participation={**how, "last": "all"}, seed=4, run_dir="two")
    assert [line.cohort for line in run.history] == [*map(len, drawn[:4]), 3] and not run.untrained(5)
    with pytest.raises(SettingsError, match="participation.last=all"):
        pflsim.resume("two", rounds=6)


def test_clients_that_never_took_part_are_counted_apart() -> None:
    """One client of three trains in the only round; the others are evaluated too."""
    run = pflsim.run(method="local", **{**SMALL, "rounds": 1}, fraction=0.34, run_dir="one")
    (trained,) = set(range(3)) - run.untrained(1)
    assert trained == cohort(run.seed, 1, 3, 0.34)[0]
    rate = run.counts(1)["accuracy"][trained]
    assert (
        f"Local: clients that have not taken part up to that round: 2; without them, the accuracy is {rate:.3f}"
        in " ".join(repr(pflsim.compare(run)).split())
    )
    assert "have not taken part up to that round: 2" in pflsim.report(run).read_text()


@pytest.mark.slow
def test_a_sweep_is_compared_and_reported() -> None:
    rounds, words = list[int](), ["model.hidden=[4]", "sweep.parallel=1"]
    calls = [lambda result: rounds.append(result.round)]
    runs = pflsim.sweep(method=["local", "fedavg"], seed=[0, 1], **SMALL, overrides=words, callbacks=calls)
    assert rounds == [1, 2] * 4
    assert [(run.method, run.seed) for run in runs] == [("local", 0), ("local", 1), ("fedavg", 0), ("fedavg", 1)]
    assert list(runs.summary()["method"]) == ["local", "local", "fedavg", "fedavg"]
    assert len(runs.metrics()) == 8 and set(runs.per_client()["run"]) == {run.name for run in runs}
    compared = pflsim.compare(runs, reference="fedavg", at="last")
    assert list(compared.records()["label"]) == ["local", "fedavg"] and "Differences to FedAvg" in repr(compared)
    assert compared._repr_html_().count("<table>") == 2
    assert "tabular" in compared.save("table.tex").read_text()
    again = pflsim.compare("runs", reference="fedavg", at="last")
    ours, theirs = (one.records().sort_values("label", ignore_index=True) for one in (compared, again))
    assert ours.equals(theirs)  # runs that begin in the same second are in the order of their names
    assert pflsim.report("runs", "other.html") == Path("other.html")
    assert pflsim.report(runs) == Path("report.html") and pflsim.report(runs[0]).parent == runs[0].folder


def test_wrong_settings_and_names() -> None:
    with pytest.raises(SettingsError, match="clients"):
        pflsim.run(method="fedavg", **SMALL | {"clients": 0})
    with pytest.raises(SettingsError, match="roundz"):
        pflsim.run(method="fedavg", roundz=3)
    with pytest.raises(SettingsError, match="nothing"):
        pflsim.load("nothing")
    with pytest.raises(SettingsError, match="method="):
        pflsim.sweep(method=[])
    with pytest.raises(SettingsError, match="^data: .*4 parts"):
        pflsim.run(method="fedavg", **SMALL | {"data": (*own_data()[0], *own_data()[1])})
    with pytest.raises(SettingsError, match="^client=1.5"):
        pflsim.load_model("nothing", client=1.5)  # type: ignore[arg-type]


class Wide(nn.Module):
    """A model of this module."""

    def __init__(self, width: int = 4, num_classes: int = 2):
        super().__init__()
        self.hidden, self.out = nn.Linear(3, width), nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(x)))


def own_data(clients: int = 3) -> tuple[Any, Any, dict[str, list[list[int]]]]:
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    x = rng.normal(size=(60, 3)).astype(np.float32) + y[:, None]
    rows = {name: [list(range(c, n, clients)) for c in range(clients)] for name, n in (("train", 40), ("test", 20))}
    return (x[:40], y[:40]), (x[40:], y[40:]), rows


@pytest.mark.slow
def test_objects_of_a_program() -> None:
    """A model, data, a partition and a method that no other process can import; resuming needs them again."""
    train, test, rows = own_data()

    class Half(ClientModule):
        def __init__(self, net: Any, training: Any, *, factor: float = 1.0):
            super().__init__(net, training)
            self.factor = factor

        def objective(self, batch: Any) -> Any:
            return {name: self.factor * term for name, term in super().objective(batch).items()}

    class Local(nn.Sequential):
        def __init__(self, width: int = 4):
            super().__init__(nn.Linear(3, width), nn.Linear(width, 2))

    given: dict[str, Any] = {"model": Local, "data": (train, test), "partition": rows, "method": Half}
    run = pflsim.run(**SMALL | given, overrides=["method.factor=0.5", "model.width=6"], run_dir="own")
    assert (run.method, run.summary["model"], run.summary["data"]) == ("Half", "Local", "data")
    assert run.config["model"]["width"] == 6 and run.config["method"]["factor"] == 0.5
    whole = pflsim.run(**SMALL | given, overrides=["model.width=6"], run_dir="whole")
    assert run.partition["hash"] == whole.partition["hash"] and run.accuracy is not None
    assert list(run.metrics()["losses.ce"])[0] < list(whole.metrics()["losses.ce"])[0]
    longer = pflsim.resume(run, rounds=3, **given)
    straight = pflsim.run(**SMALL | given | {"rounds": 3}, overrides=["method.factor=0.5", "model.width=6"])
    assert (longer.folder / "per_client.csv").read_bytes() == (straight.folder / "per_client.csv").read_bytes()
    for name, value in [*components._objects.items()]:
        if value is not Local and value is not Half:
            del components._objects[name]
    assert pflsim.load_model(longer, client=0).about["client"] == 0
    with pytest.raises(SettingsError, match="pflsim.resume"):
        pflsim.resume(run, rounds=4)


def test_rows_of_clients_are_the_given_ones() -> None:
    train, test, rows = own_data()
    run = pflsim.run(**SMALL | {"data": (train, test), "partition": rows, "model": Wide, "method": "local"})
    listed = json.loads((run.folder / "partition.json").read_text())
    assert listed["train"] == rows["train"] and listed["test"] == [[40 + row for row in each] for each in rows["test"]]
    assert run.config["model"]["_target_"] == f"{Wide.__module__}.Wide"


def test_objects_of_one_name_in_a_sweep() -> None:
    train, test, _ = own_data()
    with pytest.raises(SettingsError, match="data"):
        pflsim.sweep(**SMALL | {"data": [(train, test), (test, train)]})


@pytest.mark.slow
def test_partition_and_export() -> None:
    given = {key: SMALL[key] for key in ("data", "clients")}
    rows = pflsim.partition("rows", **given)
    run = pflsim.run(method="fedavg", **SMALL | {"rounds": 1, "model": "linear"})
    listed = json.loads(Path("rows/partition.json").read_text())
    assert listed["hash"] == run.partition["hash"] and [part.tolist() for part in rows.train] == listed["train"]
    with pytest.raises(SettingsError, match="rows"):
        pflsim.partition("rows", **given)
    assert pflsim.export(run, "all", out="programs") == [Path(f"programs/client_{client}.pt2") for client in range(3)]
    (path,) = pflsim.export(run)
    x = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    assert torch.equal(torch.export.load(path).module()(x), pflsim.load_model(run)(x))


@pytest.mark.slow
def test_tune() -> None:
    given = SMALL | {"rounds": 1, "model": "linear", "search": {"lr": [0.01, 0.1]}}
    runs = pflsim.tune("study", method=["local", "fedavg"], trials=2, seeds=1, **given)
    assert {run.method for run in runs} == {"local", "fedavg"} and Path("study/tuned.json").exists()
