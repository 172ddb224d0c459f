"""Runs as processes of their own, stopped by signals and killed: nothing is left behind, and they can be resumed."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launched import is_gone, launched, lines_until
from stopped_runs import left
from support import agree

from pflsim import cli
from ray_actors.cluster import remove_leftovers

pytestmark = [pytest.mark.slow, pytest.mark.ray]

RUN = ["method=pfedla", "data=digits", "clients=4", "rounds=30", "model.hidden=[500]", "placement.cpus=1"]
RUN += ["checkpoint.every=10"]
Started = tuple[subprocess.Popen[str], list[psutil.Process]]


def _as_in_a_terminal() -> None:
    """A background job would ignore these."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def start(folder: Path, until: str) -> Started:
    """A run up to a line, with a terminal's group of its own and Ray's files in a place of their own; its processes."""
    run = launched(
        folder.parent, *RUN, f"run_dir={folder}", env={**os.environ, "TMPDIR": str(folder.parent)},
        stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_as_in_a_terminal,
    )  # fmt: skip
    said = lines_until(run, until)
    family = psutil.Process(run.pid).children(recursive=True)
    assert any("raylet" in child.name() for child in family), said
    return run, family


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert cli.main([*RUN, "executor=inline", f"run_dir={folder}"]) == 0
    return folder


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(signum: int, straight: Path, tmp_path: Path) -> None:
    """To the whole group, which has Ray in it, as a terminal sends it."""
    folder = tmp_path / "run"
    run, family = start(folder, "round  4")
    os.killpg(run.pid, signum)
    said, _ = run.communicate()
    assert run.returncode == 128 + signum, said
    assert f"resume with  python launch.py resume={folder}" in said and "Traceback" not in said
    assert json.loads((folder / "summary.json").read_text())["complete"] is False and is_gone(run, family)
    assert cli.main([f"resume={folder}", "executor=inline"]) == 0
    agree(left(folder), left(straight))


def test_a_second_sigint_stops_at_once(tmp_path: Path) -> None:
    run, family = start(tmp_path / "run", "round  2")
    for _ in range(2):
        os.killpg(run.pid, signal.SIGINT)
    said, _ = run.communicate()
    assert run.returncode == 128 + signal.SIGINT and "Traceback" not in said, said
    assert is_gone(run, family)


def test_a_driver_that_is_killed_is_resumed_from_its_last_checkpoint(straight: Path, tmp_path: Path) -> None:
    """And an actor before; the summary knows its restart."""
    folder = tmp_path / "run"
    run, family = start(folder, "round  4")
    next(one for one in family if "ClientActor" in " ".join(one.cmdline())).kill()
    lines_until(run, "round 18")
    run.kill()
    run.communicate()
    remove_leftovers()  # as every start of Ray does
    assert is_gone(run, family) and cli.main([f"resume={folder}", "executor=inline"]) == 0
    found = left(folder)
    assert found["summary"].pop("actor_restarts") == 1
    agree(found, left(straight))


TINY = ["data=digits", "clients=3", "rounds=2", "model.hidden=[4]", "placement.cpus=1", "placement.actors=1"]
LONG = [*TINY[:2], "rounds=100000", *TINY[3:], "checkpoint.every=2", "run_dir=run"]


def test_a_run_folder_in_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    """To another new run, and to whoever would take the run up; the first one goes on."""
    monkeypatch.chdir(tmp_path)
    first = launched(tmp_path, *LONG, "method=fedavg", "executor=inline")
    try:
        lines_until(first, "round      4/")
        assert "is not empty" in refused("run_dir=run", *TINY) and "is in use by another" in refused("resume=run")
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGTERM)
        out, err = first.communicate(timeout=120)
    assert first.returncode == 128 + signal.SIGTERM and "resume=run" in out, err


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_without_ray_the_run_ends_with_a_message_and_can_be_resumed(name: str, tmp_path: Path) -> None:
    run = launched(tmp_path, *LONG, "method=fedavg")
    lines_until(run, "round      4/")
    processes = psutil.Process(run.pid).children(recursive=True)
    (needed,) = [one for one in processes if one.name() == name]
    needed.kill()
    out, err = run.communicate(timeout=120)
    assert run.returncode == 1
    said = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(said) == 1 and said[0].startswith(f"error: Ray's {name} (process {needed.pid}) has ended")
    assert "Traceback" not in err and "resume with  python launch.py resume=run" in out
    assert (tmp_path / "run" / "checkpoints").is_dir() and is_gone(run, processes)
