"""Ray on this machine: reachable from this machine only, shared by the runs of a sweep, and gone without a trace."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pflsim.config.settings import Placement, Settings
from pflsim.errors import RunError
from ray_actors import cluster, run
from ray_actors.layout import Layout

ROOT = Path(__file__).resolve().parents[2]
TWO = Placement(cpus=2, object_store_mb=200)
SAME = Layout(((0, 1), (2,)), 1.0, 0.0)


class FakeRay:
    """Writes down what was asked of it."""

    def __init__(self, up: bool = False):
        self.up, self.calls = up, list[Any]()

    def is_initialized(self) -> bool:
        return self.up

    def start(self, cpus: int, gpus: int, store_mb: int | None, folder: Path) -> None:
        assert not self.up and folder == Path("files")
        self.up = True
        self.calls.append(("init", cpus, gpus, store_mb))

    def stop(self, folder: Path) -> None:
        assert folder == Path("files")
        self.up = False
        self.calls.append("shutdown")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    monkeypatch.setattr(cluster, "ray", made)
    monkeypatch.setattr(cluster, "create_folder", lambda: Path("files"))
    monkeypatch.setattr(cluster, "start", made.start)
    monkeypatch.setattr(cluster, "stop", made.stop)
    pools = lambda joined=False: SimpleNamespace(  # noqa: E731
        actors=[],
        start=lambda layout: made.calls.append(("actors", len(layout.groups), layout.cpus)),
        server=lambda: None,
        close=lambda: made.calls.append("actors end"),
    )
    monkeypatch.setattr(cluster, "ActorPool", pools)
    return made


def test_runs_with_the_same_needs_share_ray_and_actors(fake: FakeRay) -> None:
    with closing(cluster.LocalRay()) as local:
        assert local.pool(TWO, SAME) is local.pool(replace(TWO, actors=1), SAME)
        assert fake.calls == [("init", 2, 0, 200), ("actors", 2, 1.0), ("actors", 2, 1.0)]
    assert fake.calls[-1] == "shutdown" and not fake.up


@pytest.mark.parametrize("other", [{"cpus": 3}, {"object_store_mb": 300}, {"gpus": 1}])
def test_other_needs_start_it_anew(fake: FakeRay, other: dict[str, int]) -> None:
    placement = replace(TWO, **other)
    with closing(cluster.LocalRay(cluster.StartedRay(cluster.size(TWO), 2))) as local:
        assert local.pool(TWO, SAME) is not local.pool(placement, SAME)
    size = placement.cpus, placement.gpus, placement.object_store_mb
    assert [call for call in fake.calls if call[0] != "actors"] == [
        ("init", 2, 0, 200), "shutdown", ("init", *size), "shutdown",
    ]  # fmt: skip


def test_a_start_that_takes_too_long_ends_the_run(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()
    monkeypatch.setattr(cluster, "start", lambda *_: killed.wait())
    monkeypatch.setattr(cluster, "CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(cluster, "_kill_users", lambda folder: killed.set())
    fake.up = True
    with closing(cluster.LocalRay()) as local, pytest.raises(RunError, match=r"placement\.wait_s=0\.2"):
        local.pool(replace(TWO, wait_s=0.2), SAME)
    assert killed.is_set() and not fake.up


def test_a_ray_of_someone_else_is_left_running(fake: FakeRay) -> None:
    fake.up = True
    with closing(cluster.JoinedRay()) as joined:
        joined.pool(TWO, SAME)
    assert fake.up and fake.calls == [("actors", 2, 1.0), "actors end"]


def test_the_end_of_a_process_that_ray_needs_ends_the_run() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'raylet'); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        check = cluster.watch()
        check()
        process.kill()
        with pytest.raises(RunError, match=f"raylet .process {process.pid}. has ended"):
            while not time.sleep(0.01):
                check()


# A real Ray


CODE = """
import json, os, sys
import psutil
from ray_actors import cluster
folder = cluster.start(cpus=1, gpus=0, store_mb=100)
me = psutil.Process()
processes = [me, *me.children(recursive=True)]
ports = [[one.pid, c.laddr.ip, c.laddr.port] for one in processes for c in one.net_connections("inet")
         if c.status == psutil.CONN_LISTEN or c.type.name == "SOCK_DGRAM"]
print(json.dumps({"folder": str(folder), "ports": ports, "pids": [one.pid for one in processes],
                  "names": [one.name() for one in processes]}), flush=True)
sys.stdin.readline()
cluster.stop(folder)
print(json.dumps([one.pid for one in me.children(recursive=True)]), flush=True)
"""


def started() -> tuple[subprocess.Popen[str], dict[str, Any], list[psutil.Process]]:
    """A process with a running Ray, and what it prints about it. It ends after a line of input."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    found = json.loads(process.stdout.readline())
    return process, found, [psutil.Process(pid) for pid in found["pids"]]


@pytest.mark.slow
@pytest.mark.ray
def test_it_listens_on_loopback_only_and_leaves_nothing() -> None:
    process, found, processes = started()
    assert {"raylet", "gcs_server"} <= set(found["names"])
    assert len(found["ports"]) >= 3
    assert {ip for _, ip, _ in found["ports"]} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert 8265 not in {port for _, _, port in found["ports"]}  # the dashboard's
    assert Path(found["folder"]).is_dir()
    out, _ = process.communicate("go on\n", timeout=60)
    assert process.returncode == 0 and json.loads(out) == []
    assert not psutil.wait_procs(processes, timeout=30)[1]
    assert not Path(found["folder"]).exists()


@pytest.mark.slow
@pytest.mark.ray
def test_what_a_killed_process_leaves_is_removed_by_the_next_start() -> None:
    process, found, processes = started()
    process.kill()
    process.communicate()
    assert Path(found["folder"]).is_dir()
    cluster.remove_leftovers()  # as every start does
    assert not Path(found["folder"]).exists()
    assert not psutil.wait_procs(processes, timeout=30)[1]


def test_only_folders_that_nobody_holds_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is the lock, not the number in the name: it may be of another container, or taken again."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    dead, alive, new = names = [f"pflsim-ray-{number}-x" for number in range(3)]
    for name in (*names, "other"):
        (place / name).mkdir()
    for name in (dead, alive):
        (place / name / "lock").touch()
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, str(place / alive / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "1\n"
        cluster.remove_leftovers()
        holder.kill()
    assert sorted(path.name for path in place.iterdir()) == ["other", alive, new]


# Signals while Ray starts


@pytest.mark.parametrize("joined", [False, True])
def test_a_signal_while_ray_starts_reaches_the_run(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*args: object, **settings: object) -> SimpleNamespace:
        """Set a handler of its own, as Ray's does."""
        signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(signum))
        if not joined:
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        return SimpleNamespace(address_info={"session_dir": "/tmp/ray/session_1"})

    before = signal.getsignal(signal.SIGTERM)
    for name, function in (("is_initialized", lambda: False), ("shutdown", lambda: None), ("init", init)):
        monkeypatch.setattr(cluster.ray, name, function)
    try:
        with run.Runner() as runner:
            if joined:
                for owner, name in ((cluster, "plan"), (cluster.JoinedRay, "pool")):
                    monkeypatch.setattr(owner, name, lambda *_: None)
                prepared: Any = SimpleNamespace(settings=Settings(ray_address="auto"))
                runner._executor(prepared)
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                cluster.stop(cluster.start(cpus=1, gpus=0, store_mb=100))
            assert runner.interrupts.requested == signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
