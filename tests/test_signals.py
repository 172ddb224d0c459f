"""Runs as processes of their own, stopped by signals and killed: nothing is left behind, and they can be resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from test_resume import agree, left

from pflsim import cli
from ray_actors.cluster import remove_leftovers

pytestmark = [pytest.mark.slow, pytest.mark.ray]

ROOT = Path(__file__).resolve().parents[1]
RUN = [
    *("method=pfedla", "data=digits", "clients=4", "rounds=60", "model.hidden=[500]"),
    *("placement.cpus=1", "checkpoint.every=10"),
]


@dataclass
class Started:
    """A run as a process with a terminal's group of its own, and Ray's files in a place of their own."""

    folder: Path
    process: subprocess.Popen[str]
    family: list[psutil.Process]
    output: str = ""

    def end(self) -> int:
        """Read what is left and wait; returns the exit status."""
        assert self.process.stdout is not None
        with self.process.stdout:
            self.output += self.process.stdout.read()
        return self.process.wait()

    def gone(self) -> bool:
        """Whether all processes of the run have ended, or do so soon."""
        return not psutil.wait_procs(self.family, timeout=60)[1]


def _as_in_a_terminal() -> None:
    """A background job would ignore these."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def start(folder: Path, until: str) -> Started:
    """Start a run and read until a line begins so."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), *RUN, f"run_dir={folder}"], text=True, stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder.parent)}, stderr=subprocess.STDOUT, start_new_session=True,
        preexec_fn=_as_in_a_terminal,
    )  # fmt: skip
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if line.startswith(until):
            break
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("raylet" in child.name() for child in family), seen
    return Started(folder, process, family, seen)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert cli.main([*RUN, "executor=inline", f"run_dir={folder}"]) == 0
    return folder


def leftovers(pid: int) -> list[Path]:
    """Folders of Ray's files that belong to a process."""
    return [*Path("/tmp").glob(f"pflsim-ray-{pid}-*")]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(signum: int, straight: Path, tmp_path: Path) -> None:
    """To the whole group, which has Ray in it, as a terminal sends it."""
    run = start(tmp_path / "run", "round  4")
    os.killpg(run.process.pid, signum)
    assert run.end() == 128 + signum, run.output
    assert f"resume with  python launch.py resume={run.folder}" in run.output and "Traceback" not in run.output
    assert json.loads((run.folder / "summary.json").read_text())["complete"] is False
    assert run.gone() and not leftovers(run.process.pid)
    assert cli.main([f"resume={run.folder}", "executor=inline"]) == 0
    agree(left(run.folder), left(straight))


def test_a_second_sigint_stops_at_once(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "round  2")
    for _ in range(2):
        os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == 128 + signal.SIGINT
    assert "Traceback" not in run.output, run.output
    assert run.gone() and not leftovers(run.process.pid)


def test_a_driver_that_is_killed_is_resumed_from_its_last_checkpoint(straight: Path, tmp_path: Path) -> None:
    """And an actor before; the summary knows its restart."""
    run = start(tmp_path / "run", "round  4")
    next(one for one in run.family if "ClientActor" in " ".join(one.cmdline())).kill()
    assert run.process.stdout is not None
    next(line for line in run.process.stdout if line.startswith("round 18"))
    run.process.kill()
    run.end()
    remove_leftovers()  # as every start of Ray does
    assert run.gone() and not leftovers(run.process.pid)
    assert cli.main([f"resume={run.folder}", "executor=inline"]) == 0
    found = left(run.folder)
    assert found["summary"].pop("actor_restarts") == 1
    agree(found, left(straight))
