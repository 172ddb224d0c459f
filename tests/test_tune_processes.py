"""Tuning with real runs: side by side, stopped, and as tasks on Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_resume import agree, left, stop_after

from pflsim import cli
from pflsim.commands.tune.processes import finish
from pflsim.config.compose import CONFIGS, composed, composing, plain
from pflsim.config.settings import Settings
from pflsim.engine.interrupts import Stopped
from pflsim.errors import SettingsError
from pflsim.run_folder.folder import LOCK, is_complete, run_lock

SMALL = (
    "method=fedavg",
    "clients=3",
    "rounds=4",
    "model.hidden=[4]",
    "batch_size=50",
    "executor=inline",
    "progress=none",
)
STUDY = ("tune", "method=fedavg,fedprox", "clients=3", "rounds=3", "model.hidden=[4]", "batch_size=50", "lr=0.2",
         "search.lr=[0.05,0.1,0.2,1e29]", "--trials", "6", "--seeds", "2", "--into")  # fmt: skip


def settings(folder: Path, *overrides: str) -> Settings:
    with composing([CONFIGS]):
        return plain(composed([*SMALL, *overrides, f"run_dir={folder}"], [CONFIGS]))


def test_a_run_is_finished_wherever_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its settings were written, at a checkpoint, at its end; one that fails gives the reason."""
    straight, folder = tmp_path / "straight", tmp_path / "run"
    assert finish(settings(straight)) == ""
    folder.mkdir()
    (folder / "config.yaml").touch()
    with monkeypatch.context() as patch:
        stop_after(2, patch)
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
    assert {file.name for file in (tmp_path / "study").iterdir()} <= {LOCK}


def result(folder: Path) -> dict[str, Any]:
    """What a study has found, and what its runs have left."""
    content = json.loads((folder / "tuned.json").read_text())
    runs = [path.parent for path in sorted(folder.glob("*/*/summary.json")) if is_complete(path.parent)]
    return {key: content[key] for key in ("chosen", "results")} | {path.name: left(path) for path in runs}


@pytest.mark.slow
def test_a_study_does_not_depend_on_how_many_run_at_once_or_on_being_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*STUDY, "two", "sweep.parallel=2"]) == 0
    found = result(tmp_path / "two")
    failed = [trial for trial in found["results"] if trial["failed"]]
    assert failed and len(found) == 2 + len(found["results"]) - len(failed) + 4
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-m", "pflsim", *STUDY, "one", "sweep.parallel=1"]
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    end = time.monotonic() + 240
    while (tmp_path / "out").read_text().count(": trial ") < 3:
        assert process.poll() is None and time.monotonic() < end, (tmp_path / "out").read_text()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert cli.main(["tune", "one"]) == 0
    agree(found, result(tmp_path / "one"))


@pytest.mark.slow
def test_runs_as_tasks_on_ray_equal_those_in_this_process(tmp_path: Path, pool: object) -> None:
    """Also one that fails, and a signal: the runs are saved and resumed."""
    from ray_actors.cluster.tasks import run_on_cluster

    del pool  # Ray runs
    runs = [settings(tmp_path / f"task-{lr}", f"lr={lr}") for lr in (0.1, 0.2, 1e29)]
    found = dict(run_on_cluster(runs))
    assert (found[0], found[1]) == ("", "") and "not finite" in found[2]
    for lr in (0.1, 0.2):
        assert finish(settings(tmp_path / f"here-{lr}", f"lr={lr}")) == ""
        agree(left(tmp_path / f"here-{lr}"), left(tmp_path / f"task-{lr}"))
    long = settings(tmp_path / "long", "rounds=3000")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job would ignore
    watcher = subprocess.Popen([
        sys.executable, "-c",
        "import os, sys, time, signal\n"
        f"path = {str(tmp_path / 'long' / 'metrics.jsonl')!r}\n"
        "while not os.path.exists(path) or not os.path.getsize(path): time.sleep(0.1)\n"
        f"os.kill({os.getpid()}, signal.SIGINT)",
    ])  # fmt: skip
    with pytest.raises(Stopped):
        list(run_on_cluster([long]))
    assert watcher.wait() == 0 and list((tmp_path / "long" / "checkpoints").glob("round_*"))
    assert not is_complete(tmp_path / "long")
