"""A Ray of one's own: on the loopback interface only, and gone without a trace; also when it was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ray_actors.cluster import ray_folder, watch
from ray_actors.cluster.guardian import users_of

pytestmark = [pytest.mark.slow, pytest.mark.ray]

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import json, os, sys
import psutil
from ray_actors.cluster import launcher
folder = launcher.start(cpus=1, gpus=0, store_mb=100)
import ray
@ray.remote(num_cpus=1)
class Actor:
    def ok(self): return True
actor = Actor.remote()
ray.get(actor.ok.remote())
me = psutil.Process()
processes = [me, *me.children(recursive=True)]
ports = [[one.pid, c.laddr.ip, c.laddr.port] for one in processes for c in one.net_connections("inet")
         if c.status == psutil.CONN_LISTEN or c.type.name == "SOCK_DGRAM"]
print(json.dumps({"folder": str(folder), "ports": ports, "pids": [one.pid for one in processes],
                  "names": [one.name() for one in processes]}), flush=True)
sys.stdin.readline()
launcher.stop(folder)
print(json.dumps([one.pid for one in me.children(recursive=True)]), flush=True)
"""


def started() -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A process with a running Ray, and what it prints about it. It ends after a line of input."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def described(pids: list[int]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids]


def test_it_listens_on_loopback_only_and_leaves_nothing() -> None:
    process, found = started()
    processes = described(found["pids"])
    assert {"raylet", "gcs_server"} <= set(found["names"])
    assert len(found["ports"]) >= 3
    assert {ip for _, ip, _ in found["ports"]} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert 8265 not in {port for _, _, port in found["ports"]}  # the dashboard's
    assert Path(found["folder"]).is_dir()
    out, _ = process.communicate("go on\n", timeout=60)
    assert process.returncode == 0 and json.loads(out) == []
    assert not psutil.wait_procs(processes, timeout=30)[1]
    assert not Path(found["folder"]).exists()


def test_a_killed_process_leaves_nothing() -> None:
    """Ray's processes and its files go, by themselves or by the guardian, which goes last."""
    process, found = started()
    processes = described(found["pids"])
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(processes, timeout=30)[1]
    assert not Path(found["folder"]).exists()


def test_what_is_left_when_the_guardian_is_killed_too_is_removed_by_the_next() -> None:
    process, found = started()
    processes = described(found["pids"])
    guardian = [one for one in processes if any(word.endswith("guardian.py") for word in one.cmdline())]
    for one in [*guardian, process]:
        one.kill()
    process.communicate()
    assert len(guardian) == 1 and Path(found["folder"]).is_dir()
    ray_folder.remove_leftovers()  # as every start does
    assert not Path(found["folder"]).exists()
    for one in processes:
        if one.is_running():  # two agents, which would take a minute
            one.kill()


@pytest.mark.parametrize("children", range(10))
def test_killed_while_ray_starts(children: int) -> None:
    """As soon as it has this many child processes; the guardian is the first, then come those of Ray."""
    place = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))  # a socket's path must be short
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place)}
    code = "from ray_actors.cluster import launcher; launcher.start(cpus=1, gpus=0, store_mb=100); input()"
    starting = subprocess.Popen([sys.executable, "-c", code], env=env, stdin=subprocess.PIPE)
    process = psutil.Process(starting.pid)
    while not [*place.glob("pflsim-ray-*")] or len(process.children(recursive=True)) < children:
        assert starting.poll() is None
        time.sleep(0.002)
    (folder,) = place.glob("pflsim-ray-*")
    guardians = [one for one in process.children() if any(word.endswith("guardian.py") for word in one.cmdline())]
    starting.kill()
    starting.communicate()
    assert not psutil.wait_procs(guardians, timeout=30)[1]
    if not guardians:  # it was killed before it could start one
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(place))
            patch.setattr(ray_folder, "UNLOCKED_S", -1)
            ray_folder.remove_leftovers()
    assert not folder.exists() and not users_of(folder)
    place.rmdir()


def test_only_folders_that_nobody_holds_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the lock, not the number in the name: it may be of another container, or taken again."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    names = [
        "pflsim-ray-1-dead",
        "pflsim-ray-2-alive",
        "pflsim-ray-3-new",
        "pflsim-ray-99999999999999999999-x",
        "other",
    ]
    for name in names:
        (place / name).mkdir()
    for name in (names[0], names[1], names[3]):
        (place / name / "lock").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    (place / "pflsim-ray-4-link").symlink_to(tmp_path / "elsewhere")
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, str(place / names[1] / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "1\n"
        ray_folder.remove_leftovers()
        holder.kill()
    assert sorted(path.name for path in place.iterdir()) == ["other", names[1], names[2], "pflsim-ray-4-link"]
    assert (tmp_path / "elsewhere" / "lock").exists()


def test_the_end_of_a_process_that_ray_needs_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "INTERVAL_S", 0.01)
    waiting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(watch, "REQUIRED_PROCESSES", (psutil.Process(waiting.pid).name(),))
    reasons: list[str] = []
    looking = watch.Watch(reasons.append)
    assert not reasons
    waiting.kill()
    looking._thread.join(timeout=30)
    looking.stop()
    assert len(reasons) == 1 and str(waiting.pid) in reasons[0] and "has ended" in reasons[0]
    waiting.communicate()


def test_an_intended_end_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "INTERVAL_S", 0.01)
    waiting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(watch, "REQUIRED_PROCESSES", (psutil.Process(waiting.pid).name(),))
    reasons: list[str] = []
    watch.Watch(reasons.append).stop()
    waiting.kill()
    waiting.communicate()
    assert not reasons
