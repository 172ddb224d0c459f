"""A run's model for new rows, and what loading a folder may execute."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from support import examples_of

import pflsim
from pflsim.cli import main
from pflsim.data.record import ENCODER, PICKLED, read_encoder
from pflsim.data.sources.table import Fitted
from pflsim.errors import SettingsError
from pflsim.records.evaluation import Scope
from pflsim.records.files import read_json

SMALL: dict[str, Any] = {"rounds": 1, "executor": "inline", "progress": "none", "lr": 0.1}
HOSPITALS = ["Bern", "Oslo", "St. Mary, London"]


def visits(n: int = 90) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    drawn = {"hospital": HOSPITALS, "sex": ["f", "m"], "readmitted": ["no", "yes"]}
    frame = pd.DataFrame({name: rng.choice(values, n) for name, values in drawn.items()})
    frame["age"], frame["stay"] = rng.integers(20, 90, n).astype(float), rng.exponential(5, n)
    frame["patient"] = [f"P{number:03}" for number in range(n)]
    frame.loc[3, "age"], frame.loc[4, "sex"] = np.nan, None
    return frame


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs that predict a class and a value, and the table."""
    folder = tmp_path_factory.mktemp("made")
    visits().to_csv(folder / "visits.csv", index=False)
    for name, more in {
        "class": {
            "method": "ditto",
            "data.fit": "client",
            "eval.holdout_clients": 1,
            "eval.threshold": "sensitivity:0.9",
        },
        "value": {
            "method": "local",
            "data.label": "stay",
            "data.exclude": "[patient,readmitted]",
            "model": "torch.nn.Linear",
            "model.hidden": None,
            "model.in_features": 3,
            "model.out_features": 1,
            "optimizer": "torch.optim.Adagrad",
            "optimizer.keep": True,
            "task.loss": "torch.nn.HuberLoss",
        },  # fmt: skip
    }.items():
        data = {"data": "table", "data.path": folder / "visits.csv", "data.label": "readmitted"}
        given = data | {"data.client": "hospital", "data.exclude": "[patient]", "model.hidden": "[4]"} | more
        pflsim.run(
            overrides=[f"{k}={v}" for k, v in given.items() if v is not None], run_dir=str(folder / name), **SMALL
        )
    return folder


@pytest.fixture
def copied(made: Path, here: Path) -> Path:
    """The working directory, with copies of both runs, and a module that leaves a file when it is imported."""
    shutil.copytree(made, here, dirs_exist_ok=True)
    Path("evil.py").write_text("open('imported', 'w')\n\ndef run(*arguments, **more):\n    open('called', 'w')\n")
    return here


def predictions(*words: str, run: str = "class") -> pd.DataFrame:
    assert main(["predict", run, "visits.csv", *words]) == 0
    return pd.read_csv("predictions.csv", index_col="row")


@pytest.mark.parametrize("client", HOSPITALS[:2])
@pytest.mark.parametrize("kind", ["class", "value"])
def test_rows_of_the_run_are_predicted_as_in_the_run(kind: str, client: str, copied: Path) -> None:
    found, run = predictions("--client", client, run=kind), pflsim.load(kind)[0]
    number = HOSPITALS.index(client)
    model, test = pflsim.load_model(kind, client), examples_of(run)[number]
    rows = read_json(Path(kind) / "partition.json", dict[str, Any])["test"][number]
    with torch.no_grad():
        scores = model(test.x).softmax(1) if kind == "class" else model(test.x)
    columns = ["probability_no", "probability_yes"] if kind == "class" else ["value"]
    np.testing.assert_allclose(found.loc[rows, columns], scores, rtol=0, atol=1e-6)
    if kind == "class":
        own = run.per_client().query("reported and split == 'test' and client == @number")["threshold"].item()
        assert (
            found["class"]
            .eq(np.where(found["probability_yes"].astype("float32") >= np.float32(own), "yes", "no"))
            .all()
            and own != 0.5
        )
    assert found["patient"].tolist() == visits()["patient"].tolist() and "age" not in found
    about = found[["model", "client", "round"]].drop_duplicates()
    assert about.values.tolist() == [["personal", client, 1]]
    pd.testing.assert_frame_equal(found, predictions("--client", str(number), run=kind))


def test_a_client_that_the_run_does_not_have(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = predictions()
    every = pflsim.load("class")[0].history[-1].evaluations[Scope("global", "test", "received")].metrics["threshold"]
    assert (
        expected["class"]
        .eq(np.where(expected["probability_yes"].astype("float32") >= np.float32(every.pooled), "yes", "no"))
        .all()
    )
    for client in ("west", HOSPITALS[2], "7", "00", "Olso"):  # the second joined after the last round
        capsys.readouterr()
        pd.testing.assert_frame_equal(predictions("--client", client), expected)
        said = capsys.readouterr().err
        assert "global" in said and client in said and expected["client"].isna().all()
        assert [name for name in HOSPITALS if name in said.replace(client, "")] == ["Oslo"] * (client == "Olso")
    for words in (["class", "--model", "personal"], ["value"]):
        assert main(["predict", words[0], "visits.csv", "--client", "Olso", *words[1:]]) == 2
        said = capsys.readouterr().err
        assert all(name in said for name in HOSPITALS[:2])


def test_new_tables(copied: Path, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]) -> None:
    ids = ["1001", "", *map(str, range(2**53 + 1, 2**53 + 89))]
    new = visits().assign(sex="x", hospital="Bern", id=ids, mark=["1.50", "true", *["007"] * 88])
    new.to_csv("visits.csv", index=False)
    predictions("--client", "Bern")
    assert "sex x" in capsys.readouterr().err
    written = pd.read_csv("predictions.csv", dtype=str, keep_default_na=False)
    assert written["id"].tolist() == ids and written["mark"].tolist() == [*new["mark"]]
    new.drop(columns=["age", "sex"]).to_csv("visits.csv", index=False)
    said = refused("predict", "class", "visits.csv", "--client", "Bern")
    assert "'age'" in said and "'sex'" in said


EVIL = {"_target_": "evil.run"}
BROKEN = "a-setting-that-does-not-exist"
"""Names of settings are collected from the components for the message about it."""


def with_changes(folder: str, changes: dict[str, Any]) -> None:
    """Replace values of config.yaml, by dotted key."""
    path = Path(folder) / "config.yaml"
    config = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
    path.write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"_target_": "pandas.read_pickle", "filepath_or_buffer": "evil.pkl"}}, "pandas.read_pickle"),
        ({"model": EVIL}, "evil.run"),
        ({"model.variants": [EVIL]}, "evil.run"),
        ({"model.common": EVIL}, "evil.run"),
        ({"method.client": EVIL}, "evil.run"),
        ({"method.server": EVIL}, "evil.run"),
        ({"task.loss": "evil.run"}, "evil.run"),
        ({"optimizer.name": "evil.run", "optimizer.keep": True}, "evil.run"),
        ({"lora": {"r": 1, "megatron_config": {"a": 1}, "megatron_core": "evil"}}, "lora"),
        ({"data": EVIL, BROKEN: 1}, BROKEN),
        ({"model": {"_target_": "pflsim.config.compose.import_module", "name": "evil"}}, "import_module"),
        ({"model": {"_target_": "pflsim.load_model", "run": "class", "trusted": True}}, "load_model"),
        ({"model": {"_target_": "torch.nn.functional.boolean_dispatch"}}, "boolean_dispatch"),
        ({"model": {"_target_": "torch.hub.load", "github": "evil"}}, "torch.hub.load"),
    ],
    ids=str,
)
def test_code_that_a_folder_names_is_not_run(changes: dict[str, Any], named: str, copied: Path) -> None:
    with_changes("class", changes)
    for run in ("class", pflsim.load("class")[0]):
        with pytest.raises(SettingsError, match=named) as caught:
            pflsim.load_model(run, "Bern")
    assert named == BROKEN or "trusted=True" in str(caught.value)
    assert not Path("imported").exists() and "evil" not in sys.modules


def test_the_encoder_of_an_earlier_version_is_read_if_the_folder_is_trusted(
    copied: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    expected, encoder, frame = predictions("--client", "Bern", run="value"), read_encoder(Path("value")), visits()
    with monkeypatch.context() as patched:
        patched.setattr(Fitted, "of", lambda transformer: transformer)
        rows = np.concatenate(read_json(Path("value/partition.json"), dict[str, Any])["train"])
        joblib.dump(replace(encoder, fitted=[encoder.fit(encoder.columns(frame).iloc[rows])]), Path("value") / PICKLED)
    (Path("value") / ENCODER).unlink()
    assert PICKLED in refused("predict", "value", "visits.csv", "--client", "Bern")
    pd.testing.assert_frame_equal(predictions("--client", "Bern", "--trusted", run="value"), expected)


AUDITED = """
import sys

def refuse(event, arguments):
    if event == "pickle.find_class":
        raise SystemExit(f"pickle.find_class {arguments}")

sys.addaudithook(refuse)
import pandas, pflsim
from pflsim.cli import main
pflsim.load_model("class", "Bern").predict_frame(pandas.read_csv("visits.csv"))
assert main(["predict", "class", "visits.csv"]) == main(["compare", "class"]) == 0
assert main(["predict", "value", "visits.csv", "--client", "Bern"]) == 2
"""


@pytest.mark.slow
def test_loading_predicting_and_comparing_read_no_pickle(copied: Path) -> None:
    joblib.dump(nothing := {}, "evil.pkl")
    with_changes("value", {"model": {"_target_": "pandas.read_pickle", "filepath_or_buffer": "evil.pkl"}})
    done = subprocess.run([sys.executable, "-c", AUDITED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pandas.read_pickle" in done.stderr and not nothing
