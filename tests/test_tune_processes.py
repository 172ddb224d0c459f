"""Tuning with real runs: side by side, stopped and killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from support import agree, settings_of
from test_resume import left, stop_after

from pflsim import cli
from pflsim.commands.tune import finish
from pflsim.commands.tune_study import JOURNAL
from pflsim.config.settings import Settings
from pflsim.engine.interrupts import Stopped
from pflsim.errors import SettingsError
from pflsim.records.folder import LOCK, is_complete, run_lock

SMALL = ("method=fedavg", "clients=3", "rounds=4", "model.hidden=[4]", "batch_size=50", "executor=inline")
STUDY = ("tune", "method=fedavg,fedprox", "clients=3", "rounds=3", "model.hidden=[4]", "batch_size=50", "lr=0.2",
         "search.lr=[0.05,0.2,1e29]", "--trials", "4", "--seeds", "1", "--into")  # fmt: skip


def trials(folder: Path) -> dict[str, list[optuna.trial.FrozenTrial]]:
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    names = optuna.study.get_all_study_names(storage)
    return {name: optuna.load_study(study_name=name, storage=storage).trials for name in names}


def settings(folder: Path, *overrides: str) -> Settings:
    return settings_of(*SMALL, "progress=none", *overrides, f"run_dir={folder}")


def test_a_run_is_finished_wherever_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its settings were written, at a checkpoint, at its end; one that fails gives the reason."""
    straight, folder = tmp_path / "straight", tmp_path / "run"
    assert finish(settings(straight)) == ""
    folder.mkdir()
    (folder / "run.log").touch()
    stop_after(2, monkeypatch)
    with pytest.raises(Stopped):
        finish(settings(folder))
    with run_lock(folder), pytest.raises(SettingsError):  # in use, which is no failure of the trial
        finish(settings(folder))
    assert not is_complete(folder) and finish(settings(folder)) == ""
    agree(left(straight), left(folder))
    written = (folder / "metrics.jsonl").stat().st_mtime_ns
    assert finish(settings(folder)) == "" and (folder / "metrics.jsonl").stat().st_mtime_ns == written
    assert "not finite" in finish(settings(tmp_path / "diverges", "lr=1e29"))


def test_settings_that_cannot_be_run_begin_no_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake that only the data or the model shows costs no trial, and a corrected command can take the folder."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune", "method=fedavg", "clients=3", "rounds=1", "model=cnn", "--into", "study"]) == 2
    said = capsys.readouterr()
    assert "fedavg: " in said.err and "images" in said.err and "trial" not in said.out
    assert {file.name for file in (tmp_path / "study").iterdir()} <= {LOCK, JOURNAL}


def result(folder: Path) -> dict[str, Any]:
    """What the trials of a study have found, and what its runs have left."""
    runs = [path.parent for path in sorted(folder.glob("*/*/summary.json")) if is_complete(path.parent)]
    found = {name: [(one.params, one.value) for one in own] for name, own in trials(folder).items()}
    return {"page": (folder / "tuned.md").read_text(), **found, **{path.name: left(path) for path in runs}}


def end_session(folder: Path, signum: int, after: int) -> int:
    """Run a study in a process that gets a signal after so many trials; return its exit status."""
    out = folder.with_suffix(f".{signum}.out")
    with out.open("w") as stream:
        command = [sys.executable, "-m", "pflsim", *STUDY, folder.name, "sweep.parallel=1"]
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=folder.parent, start_new_session=True)
    end = time.monotonic() + 240
    while out.read_text().count(": trial ") < after:
        assert process.poll() is None and time.monotonic() < end, out.read_text()
        time.sleep(0.05)
    process.send_signal(signum)
    status = process.wait(60)
    lines = out.read_text().splitlines()
    assert all(line.startswith(("fed", "continue with", "stopped")) for line in lines), lines  # nothing of Optuna
    while not all(map(is_free, folder.glob("*/*"))):  # the run that a killed study leaves is still saving
        assert time.monotonic() < end
        time.sleep(0.05)
    return status


def is_free(folder: Path) -> bool:
    try:
        with run_lock(folder):
            return True
    except SettingsError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("primary", "sign"), [("rmse", -1), ("r2", 1)])
def test_the_direction_of_the_primary_metric(
    primary: str, sign: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lower error is better; the R² of a poor model is negative. The table shows the metric, Optuna maximises."""
    monkeypatch.chdir(tmp_path)
    task = ["task=regression", f"eval.primary={primary}", "search.lr=[0.001,0.0001]", "--trials", "2", "--seeds", "1"]
    assert cli.main(["tune", *SMALL, "data=digits", *task, "--into", "study"]) == 0
    row = next(line for line in (tmp_path / "study" / "tuned.md").read_text().splitlines() if "| fedavg " in line)
    values = {one.params["lr"]: one.value or 0.0 for one in trials(tmp_path / "study")["fedavg"]}
    assert values[0.0001] < values[0.001] < 0
    assert float(row.split("|")[-2]) == pytest.approx(sign * values[0.001], abs=1e-4)


@pytest.mark.slow
def test_a_study_that_is_killed_and_continued_equals_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*STUDY, "straight", "sweep.parallel=1"]) == 0
    assert end_session(tmp_path / "one", signal.SIGKILL, 2) == -signal.SIGKILL
    assert end_session(tmp_path / "one", signal.SIGINT, 2) == 130
    assert cli.main([*STUDY, "one", "sweep.parallel=1"]) == 0
    straight = result(tmp_path / "straight")
    agree(straight, result(tmp_path / "one"))
    assert (len(straight["fedavg"]), len(straight["fedprox"])) == (3, 4) and "failed: fedavg trial" in straight["page"]
