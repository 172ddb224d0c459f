"""Ray: started on this machine, reachable from this machine only; or a running cluster that a run joins."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.job_config import JobConfig

from pflsim.config.names import FOLDER, program
from pflsim.config.settings import Placement, Settings
from pflsim.errors import RunError, SettingsError
from pflsim.records.limits import check_limits, free_memory, usable_cpus
from ray_actors import ray_private
from ray_actors.layout import ACTOR_MB, Layout, Node, ResourcesMissing, lay_out, share
from ray_actors.resources import POLL_S, ActorPool

if TYPE_CHECKING:
    from lightning_modules.prepare import PreparedRun

PREFIX = "pflsim-ray-"
MAX_PATH_LENGTH = 28
"""Of the folder, in bytes: the path of a socket in it must not exceed 107 bytes."""
FILES, LOCK = "r", "lock"
"""In the folder, which only this user can open: Ray's folder, and a file that this process locks as long as it lives.
Ray's own folder is open to all users."""
CONNECT_TIMEOUT_S = 5.0
"""How long the head may take to accept a connection; Ray itself would try for minutes."""
CLOSE_TIMEOUT_S = 90.0
"""How long the end of a run waits for a start of Ray, which gives up after a minute itself. If its processes are killed
while this one connects to them, Ray ends this one without a message."""
_locks: dict[Path, int] = {}


# Ray on this machine


def start(cpus: int, gpus: int, store_mb: int | None = None, folder: Path | None = None) -> Path:
    """Start Ray on the loopback interface, without a dashboard.

    Args:
        cpus: the CPUs that actors can request.
        gpus: the GPUs that actors can request.
        store_mb: the size of the object store in MiB; None: 30% of the free memory.
        folder: of its files, from `create_folder`; None: a new one.

    Returns:
        The folder of its files, for `stop`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # of the actors, see `pflsim.cli.run`
    try:
        Path("~/.ray").expanduser().mkdir(exist_ok=True)
    except (OSError, RuntimeError):  # Ray cannot write its token there
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_urlsafe(32))
    remove_leftovers()
    folder = folder or create_folder()
    ray_private.silence_notices()
    ray_private.listen_on_loopback()
    # Ray's processes are in the process group of this one. Block signals to the group, which would end them before the
    # run has saved its state.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM})
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            object_store_memory=store_mb and store_mb * 2**20,
            include_dashboard=False,
            logging_level=logging.WARNING,
            job_config=_SafePathConfig(),
            _temp_dir=str(folder / FILES),  # RAY_TMPDIR would set it for later runs, too
        )
    except BaseException as error:
        stop(folder)
        if not isinstance(error, Exception):
            raise
        why = str(error).partition("\n")[0]  # on a busy machine, Ray gives up after a minute
        raise RunError(f"Ray did not start: {why.rstrip('.')}; use executor=inline to run without Ray") from error
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced it by one that exits at once
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return folder


def stop(folder: Path) -> None:
    """Stop the Ray that `start` has started, and remove its files."""
    ray_private.end_without_waiting()
    ray.shutdown()
    _kill_users(folder)
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


class _SafePathConfig(JobConfig):
    """A job whose processes do not search the working directory for modules, unless pflsim is there.

    A file numpy.py there would replace a library.
    """

    def _serialize(self) -> str:
        here = {str(Path.cwd())} - {str(FOLDER)}
        self._py_driver_sys_path = [folder for folder in self._py_driver_sys_path if folder not in here]
        return super()._serialize()


def create_folder() -> Path:
    """Create and lock a folder in the system's folder for temporary files, or in /tmp if the path of that is long."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > MAX_PATH_LENGTH - len(PREFIX):
        parent = "/tmp"
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    (folder / LOCK).touch()
    if (lock := _lock(folder / LOCK)) is not None:
        _locks[folder] = lock
    (folder / FILES).mkdir()
    return folder


def remove_leftovers() -> None:
    """Remove the folders of processes that were killed, and end the Ray processes that still use them."""
    for parent in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for folder in parent.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if (lock := _lock(folder / LOCK)) is not None:
                    _kill_users(folder)
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)


def _lock(path: Path) -> int | None:
    """Lock a file until this process ends; return None if another process, in whatever container, holds the lock."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _kill_users(folder: Path) -> None:
    """Kill the Ray processes of this user that have the folder in their command line, or a file in it open."""
    killed = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            words = process.cmdline() if process.uids().real == os.getuid() else []
            if process.pid == os.getpid() or not any(word.startswith("ray::") or "/ray/" in word for word in words):
                continue
            files = (file.path for file in process.open_files())
            if any(f"{folder}/" in word for word in words) or any(path.startswith(f"{folder}/") for path in files):
                process.kill()
                killed.append(process)
    psutil.wait_procs(killed, timeout=10)


def size(placement: Placement) -> tuple[int, int, int | None]:
    """Return the CPUs, GPUs and MiB of the object store with which Ray is started for a run."""
    return placement.cpus or usable_cpus(), placement.gpus, placement.object_store_mb


class StartedRay:
    """Starts Ray in a thread, and actors, which import torch while this process prepares the run.

    Args:
        started_for: the size of Ray, see `size`.
        actors: the number of client actors to start; 0 starts none.

    Attributes:
        pool: of the actors.
    """

    def __init__(self, started_for: tuple[int, int, int | None], actors: int = 0):
        self.size, self.pool, self._actors = started_for, ActorPool(), actors
        check_limits(actors or self.size[0])
        self._folder = create_folder()
        self._ready: Future[ActorPool] = Future()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="start-ray", daemon=True).start()

    def _run(self) -> None:
        try:
            start(*self.size, self._folder)
            self.pool.check_ray = watch()
            if self._actors:
                self.pool.start(Layout(((),) * self._actors, share([self.size[0]], self._actors), 0.0))
                self.pool.server()
            self._ready.set_result(self.pool)
        except BaseException as error:
            self._ready.set_exception(error)
        self._closed.wait()  # Linux ends the processes of Ray with the thread that has started them

    def wait(self, seconds: float) -> ActorPool:
        """Wait until Ray runs, and return the pool; raises the error of its start.

        Raises:
            RunError: it does not run after that many seconds.
        """
        try:
            return self._ready.result(seconds)
        except TimeoutError:
            why = f"Ray has not started within placement.wait_s={seconds:g} seconds"
            raise RunError(f"{why}: wait longer, or use executor=inline to run without Ray") from None

    def close(self) -> None:
        """Stop Ray with its actors; if it is starting, wait for it a little first."""
        for _ in range(2):
            with suppress(TimeoutError):
                self._ready.exception(CLOSE_TIMEOUT_S)
                break
            _kill_users(self._folder)  # so that the start fails
        stop(self._folder)
        self._closed.set()


def watch() -> Callable[[], None]:
    """Return a function that raises a `RunError` if a process has ended that the Ray started here needs.

    Ray itself would end this process without a message (raylet), or wait for a minute (GCS).
    """
    needed = [(p, name) for p in psutil.Process().children() if (name := p.name()) in ("raylet", "gcs_server")]
    looked = 0.0

    def check() -> None:
        nonlocal looked
        if time.monotonic() < looked + POLL_S:
            return
        looked = time.monotonic()
        for process, name in needed:
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    continue
            raise RunError(f"Ray's {name} (process {process.pid}) has ended, so the run cannot continue")

    return check


class LocalRay:
    """Starts Ray and its actors, and keeps them for the next run if it needs the same.

    Args:
        early: is starting already.
    """

    def __init__(self, early: StartedRay | None = None):
        self._started = early

    def nodes(self, placement: Placement) -> list[Node]:
        """Return the resources of this machine for a run; the memory of running actors counts as free."""
        actors = self._started.pool.actors if self._started else ()
        cpus, gpus, _ = size(placement)
        return [Node("this machine", cpus, gpus, free_memory() / 2**20 + len(actors) * ACTOR_MB)]

    def pool(self, placement: Placement, layout: Layout) -> ActorPool:
        """Start Ray and the actors of a run, if they do not run yet."""
        if self._started is None or self._started.size != size(placement):
            self.close()
            self._started = StartedRay(size(placement))
        pool = self._started.wait(placement.wait_s)
        pool.wait_s = placement.wait_s
        pool.start(layout)
        return pool

    def close(self) -> None:
        """End the actors, and the Ray that was started here."""
        if self._started is not None:
            self._started.close()
            self._started = None


def start_early(settings: Settings) -> LocalRay | None:
    """Start Ray for a run on this machine; None if this process is connected to a Ray already."""
    if ray.is_initialized():
        return None
    started_for = size(settings.placement)
    return LocalRay(StartedRay(started_for, settings.placement.actors or min(settings.clients, started_for[0])))


# A running cluster


class JoinedRay:
    """Starts actors on a running cluster, and ends them after the last run.

    Args:
        address: auto, or HOST:PORT of the head; not used if this process is connected to Ray already.
    """

    def __init__(self, address: str | None = None):
        self._pool, self._joins = ActorPool(joined=True), not ray.is_initialized()
        if self._joins:
            join(address or "auto")

    def nodes(self, placement: Placement) -> list[Node]:
        """Return the free resources of the nodes; those of this process's actors count as free."""
        return self._pool.free()

    def pool(self, placement: Placement, layout: Layout) -> ActorPool:
        """Reserve the resources of a run and start its actors."""
        self._pool.wait_s, self._pool.strategy = placement.wait_s, placement.strategy.upper()
        self._pool.start(layout)
        return self._pool

    def close(self) -> None:
        """End all actors, and leave the cluster unless this process was connected to it before."""
        try:
            self._pool.close()
        finally:
            if self._joins:
                ray.shutdown()


def join(address: str) -> None:
    """Connect this process to a cluster.

    Raises:
        SettingsError: there is no cluster at this address, or this machine is not a node of it.
    """
    host, _, port = address.rpartition(":")
    if address != "auto":  # which Ray looks for on this machine
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError, OverflowError) as error:
            raise SettingsError(
                f"ray_address={address}: nothing answers there ({error}); expected auto or HOST:PORT of a cluster that "
                f"was started with ray start --head; to run as a job of another cluster, use {program()} submit"
            ) from error
    ray_private.silence_notices()
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # pflsim repeats failed calls and reports them itself
    try:
        context: Any = ray.init(address=address, logging_level=logging.WARNING, job_config=_SafePathConfig())
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        advice = f"run ray start --address=HOST:PORT here, or submit the run as a job: {program()} submit ..."
        raise SettingsError(
            f"ray_address={address}: only a node of the cluster can join it ({reason}): {advice}"
        ) from error
    if any(part.startswith(PREFIX) for part in Path(context.address_info["session_dir"] or "").parts):
        ray.shutdown()
        why = "this Ray belongs to another run and ends with it"
        raise SettingsError(f"ray_address={address}: {why}; start a cluster with ray start --head")


def plan(prepared: PreparedRun, found: LocalRay | JoinedRay) -> Layout:
    """Decide which clients live on which actor; on a cluster, wait for nodes for up to `placement.wait_s` seconds.

    Raises:
        SettingsError: the placement cannot be met on this machine, or is contradictory.
        RunError: the cluster has too little.
    """
    placement, deadline = prepared.settings.placement, time.monotonic() + prepared.settings.placement.wait_s
    while True:
        nodes = found.nodes(placement)
        try:
            if isinstance(found, JoinedRay) and len(nodes) < (asked := placement.nodes or 0):
                raise ResourcesMissing(f"placement.nodes={asked}, but the cluster has {len(nodes)} nodes")
            return lay_out(prepared.batches_per_round, placement, nodes, prepared.factory.groups)
        except ResourcesMissing as error:
            if isinstance(found, LocalRay):
                raise
            if time.monotonic() >= deadline:
                waited = f"after placement.wait_s={placement.wait_s:g} seconds"
                raise RunError(f"{error} ({waited}); request less, or wait longer") from None
        time.sleep(POLL_S)
