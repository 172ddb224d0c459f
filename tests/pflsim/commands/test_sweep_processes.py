"""Runs of a sweep side by side: equal to those one after the other, and independent of each other's failures."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from optuna.storages.journal import JournalFileBackend
from process_functions import count, die, fail, say, wait_for_signal
from stopped_runs import left, stop_after
from support import agree, settings_of

from pflsim import cli
from pflsim.commands.sweep import parallel_runs
from pflsim.commands.tune import finish
from pflsim.commands.tune_study import JOURNAL
from pflsim.config.settings import Settings
from pflsim.engine.interrupts import Stopped
from pflsim.errors import SettingsError
from pflsim.records import limits
from pflsim.records.folder import LOCK, is_complete, last_run, run_lock
from pflsim.records.scalars import hyperparameters
from pflsim.terminal.processes import Ended, in_processes

pytestmark = pytest.mark.slow

SMALL = ["executor=inline", "method=fedavg", "clients=3", "rounds=2", "model.hidden=[4]", "batch_size=50"]


def collected(*functions: Any, parallel: int = 2) -> dict[int, Ended]:
    return {one.number: one for one in in_processes(functions, parallel)}


def test_results_output_and_failures() -> None:
    ends = [partial(say, "a"), partial(fail, SettingsError("wrong")), partial(fail, ValueError("a bug"))]
    found = collected(*ends, partial(say, "b"), die, partial(say, "z"))
    assert (found[0].result, found[0].output, found[0].errors) == ("A", "a\n", "")
    assert (found[1].result, found[1].output, found[1].errors) == (None, "before\n", "error: wrong\n")
    assert found[2].result is None and "ValueError: a bug" in found[2].errors
    assert found[4].result is None and "killed" in found[4].errors
    assert found[5].result == "Z"


@pytest.mark.parametrize("parallel", [1, 3])
def test_at_most_so_many_at_once(parallel: int, tmp_path: Path) -> None:
    found = collected(*(partial(count, tmp_path, number) for number in range(5)), parallel=parallel)
    assert max(one.result for one in found.values()) == parallel


def test_a_signal_reaches_every_process_once(tmp_path: Path) -> None:
    """The third function is not started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job would ignore
    functions = [partial(wait_for_signal, tmp_path, name) for name in "abc"]
    found = list[Any]()
    watcher = subprocess.Popen([
        sys.executable, "-c",
        "import os, sys, time, signal\n"
        f"while len(os.listdir({str(tmp_path)!r})) < 2: time.sleep(0.01)\n"
        f"os.kill({os.getpid()}, signal.SIGINT)",
    ])  # fmt: skip
    with pytest.raises(Stopped):
        for one in in_processes(functions, 2):
            found.append(one.result)
    assert watcher.wait() == 0
    assert sorted(found) == ["a: 1", "b: 1"] and not (tmp_path / "c").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("line", "runs", "expected"),
    [
        ("executor=inline", 9, 4),  # CPUs
        ("executor=inline", 3, 3),
        ("executor=inline placement.threads=2", 9, 2),
        ("executor=inline placement.threads=8", 9, 1),
        ("executor=inline sweep.parallel=6", 9, 6),
        ("executor=inline placement.gpus=1", 9, 1),
        ("executor=inline data=mnist data.root=x data.download=true", 9, 1),
        ("executor=ray", 9, 1),
        ("executor=inline", 1, 1),
    ],
)
def test_how_many_at_once(line: str, runs: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "usable_cpus", lambda: 4)
    monkeypatch.setattr(limits, "free_memory", lambda: 100 * 2**30)
    settings = [settings_of(*line.split())] * runs
    assert parallel_runs(settings) == expected
    monkeypatch.setattr(limits, "free_memory", lambda: 5 * 2**30)
    assert parallel_runs(settings) == (expected if "parallel" in line else min(expected, 2))


def test_side_by_side_equals_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with a run that fails: the others are complete."""
    monkeypatch.chdir(tmp_path)
    sweep = ["-m", *SMALL, "lr=0.1,0.2,1e29"]
    for parallel in (2, 1):
        assert cli.main([*sweep, f"sweep.parallel={parallel}", f"run_dir=${{lr}}-{parallel}"]) == 1
        said = capsys.readouterr()
        assert re.search(r"1 of 3 runs failed:\n\[3/3\] lr=1e\+29: .*not finite", said.err) and "not finite" in said.err
        assert "resume with" not in said.out + said.err
    for lr in (0.1, 0.2):
        agree(left(tmp_path / f"{lr}-2"), left(tmp_path / f"{lr}-1"))


def test_folders_and_hyperparameters_carry_what_varies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    swept = ["sweep.parallel=1", "lr=0.1,0.2", "+model.variants=[],[{hidden:[3]}]"]
    assert cli.main(["-m", *SMALL, "partition=iid", *swept]) == 0
    names = sorted(folder.name.partition("-fedavg-digits-")[2] for folder in (tmp_path / "runs").iterdir())
    assert names == [f"lr={lr}-variants={v}-s0" for lr in ("0.1", "0.2") for v in ("_", "_hidden_3_")]
    assert last_run(tmp_path / "runs").name.endswith("-s0")
    shown = hyperparameters({"lr": 0.1, "rounds": 2, "seed": 3}, {"method": "fedavg", "sweep": "method,seed"})
    assert shown == {"method": "fedavg", "seed": 3}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_leaves_runs_to_resume(signum: int, tmp_path: Path) -> None:
    """After kill -9 of the parent, the processes save their runs and end too."""
    command = [sys.executable, "-m", "pflsim", "-m", *SMALL, "rounds=5000", "seed=0,1,2", "sweep.parallel=2"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out, start_new_session=True)
    lines = lambda: [p.read_text().count("\n") for p in tmp_path.glob("runs/*/metrics.jsonl")]  # noqa: E731
    end = time.monotonic() + 120
    while len([n for n in lines() if n > 2]) < 2:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.2)
    children = psutil.Process(process.pid).children()
    process.send_signal(signum)
    assert process.wait(60) == (130 if signum == signal.SIGINT else -signum)
    assert not psutil.wait_procs(children, 60)[1]
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2 and all(list(run.glob("checkpoints/round_*")) for run in runs)
    if signum == signal.SIGINT:
        said = (tmp_path / "out").read_text()
        assert all(f"resume={Path('runs', run.name)}" in said for run in runs)


OF_TUNE = ("method=fedavg", "clients=3", "rounds=4", "model.hidden=[4]", "batch_size=50", "executor=inline")


def trials(folder: Path) -> dict[str, list[optuna.trial.FrozenTrial]]:
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    names = optuna.study.get_all_study_names(storage)
    return {name: optuna.load_study(study_name=name, storage=storage).trials for name in names}


def settings(folder: Path, *overrides: str) -> Settings:
    return settings_of(*OF_TUNE, "progress=none", *overrides, f"run_dir={folder}")


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
    words = ["data=breast_cancer", "model=linear", "clients=3", "rounds=1"]
    assert cli.main(["tune", "method=fedavg,fedrep", *words, "--into", "study"]) == 2
    said = capsys.readouterr()
    assert "fedrep: " in said.err and "net.body" in said.err and "trial" not in said.out
    assert {file.name for file in (tmp_path / "study").iterdir()} <= {LOCK, JOURNAL}


@pytest.mark.parametrize(("primary", "sign"), [("rmse", -1), ("r2", 1)])
def test_the_direction_of_the_primary_metric(
    primary: str, sign: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lower error is better; the R² of a poor model is negative. The table shows the metric, Optuna maximises."""
    monkeypatch.chdir(tmp_path)
    task = ["task=regression", f"eval.primary={primary}", "search.lr=[0.001,0.0001]", "--trials", "2", "--seeds", "1"]
    assert cli.main(["tune", *OF_TUNE, "data=digits", *task, "--into", "study"]) == 0
    row = next(line for line in (tmp_path / "study" / "tuned.md").read_text().splitlines() if "| FedAvg " in line)
    values = {one.params["lr"]: one.value or 0.0 for one in trials(tmp_path / "study")["fedavg"]}
    assert values[0.0001] < values[0.001] < 0
    assert float(row.split("|")[-2]) == pytest.approx(sign * values[0.001], abs=1e-4)
