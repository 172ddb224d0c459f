"""Runs as processes of their own, stopped by signals and killed: nothing is left behind, and they can be resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from launched import is_gone, launched, lines_until
from support import agree
from test_resume import left

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
