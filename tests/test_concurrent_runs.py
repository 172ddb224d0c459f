"""Several runs at once on one machine, from one folder; processes of Ray that are killed; one run folder for two."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from launched import is_gone, launched, lines_until

pytestmark = pytest.mark.slow

TINY = ["data=digits", "clients=3", "rounds=2", "model.hidden=[4]", "placement.cpus=1", "placement.actors=1"]
LONG = [*TINY[:2], "rounds=100000", *TINY[3:], "checkpoint.every=2", "run_dir=run"]


@pytest.mark.ray
def test_two_at_once_do_not_meet(tmp_path: Path) -> None:
    """The same method, data and seed, so that their folders would have the same name."""
    runs = [launched(tmp_path, *TINY, "method=fedavg") for _ in range(2)]
    said = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    assert len({(folder / "per_client.csv").read_bytes() for folder in folders}) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    assert all(is_gone(run, []) for run in runs)


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


@pytest.mark.ray
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
