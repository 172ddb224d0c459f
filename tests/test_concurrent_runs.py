"""Several runs at once on one machine, from one folder; processes of Ray that are killed; one run folder for two."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from pflsim import cli

pytestmark = [pytest.mark.slow, pytest.mark.ray]

LAUNCH = Path(__file__).resolve().parents[1] / "launch.py"
TINY = ["data=digits", "clients=3", "rounds=2", "model.hidden=[4]", "placement.cpus=1", "placement.actors=1"]
LONG = [*TINY[:2], "rounds=100000", *TINY[3:], "checkpoint.every=2", "run_dir=run"]


def launched(folder: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", str(LAUNCH), *arguments], cwd=folder, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(process: subprocess.Popen[str], start: str) -> None:
    """Read the output until a line begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return
    raise AssertionError(f"no line {start}: {process.communicate()[1]}")


def test_two_at_once_do_not_meet(tmp_path: Path) -> None:
    """The same method, data and seed, so that their folders would have the same name."""
    runs = [launched(tmp_path, [*TINY, "method=fedavg"]) for _ in range(2)]
    said = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    assert len({(folder / "per_client.csv").read_bytes() for folder in folders}) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    for run in runs:
        assert not [*Path("/tmp").glob(f"pflsim-ray-{run.pid}-*")]


def test_a_run_folder_in_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To another new run, and to whoever would take the run up; the first one goes on."""
    monkeypatch.chdir(tmp_path)
    first = launched(tmp_path, [*LONG, "method=fedavg", "executor=inline"])
    try:
        wait_for(first, "round      4/")
        for arguments, words in ((["run_dir=run", *TINY], "is not empty"), (["resume=run"], "is in use by another")):
            assert cli.main(arguments) == 2
            err = capsys.readouterr().err
            assert words in err and len(err.splitlines()) == 1, err
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGTERM)
        out, err = first.communicate(timeout=120)
    assert first.returncode == 128 + signal.SIGTERM and "resume=run" in out, err


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_without_ray_the_run_ends_with_a_message_and_can_be_resumed(name: str, tmp_path: Path) -> None:
    run = launched(tmp_path, [*LONG, "method=fedavg"])
    wait_for(run, "round      4/")
    processes = psutil.Process(run.pid).children(recursive=True)
    (needed,) = [one for one in processes if one.name() == name]
    needed.kill()
    out, err = run.communicate(timeout=120)
    assert run.returncode == 1
    said = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(said) == 1 and said[0].startswith(f"error: Ray's {name} (process {needed.pid}) has ended")
    assert "Traceback" not in err and "resume with  python launch.py resume=run" in out
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert not psutil.wait_procs(processes, timeout=30)[1]
    assert not [*Path("/tmp").glob(f"pflsim-ray-{run.pid}-*")]
