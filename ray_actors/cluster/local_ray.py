"""A Ray of our own on this machine: reachable from nowhere else, quiet, and gone without a trace when it ends."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from ray_actors.cluster.guardian import Guardian, end

LONGEST = 28
"""Characters of the folder for Ray's files: the sockets in it may have paths of 107 with what Ray puts behind it."""
INSIDE, LOCK = "r", "lock"
"""Ray's own folder, which it opens to everybody, in one that is ours alone; and what we hold as long as we live."""
PREFIX = "pflsim-ray-"
ENDING_S = 5.0
"""How long Ray's processes may take to end by themselves."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # whatever its name says: off means that Ray stays on 127.0.0.1
}
"""For the processes that Ray starts."""
_guardians: dict[Path, Guardian] = {}
_locks: dict[Path, int] = {}


def start(cpus: int, gpus: int, store_mb: int) -> Path:
    """Start Ray on the loopback interface, without dashboard.

    Args:
        cpus: what it may give to actors.
        gpus: likewise.
        store_mb: MiB of shared memory.

    Returns:
        The folder of its files, for `stop`.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False  # where ray was imported before the line above
    remove_left_behind()
    folder = _folder()
    # Ray switches token authentication on by itself, which is right, and says so each time, which is noise.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    # Ray's processes belong to our group: what is sent to all of it would end them before the state is saved.
    clients_done = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM})
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address="local",
            _node_ip_address="127.0.0.1",
            num_cpus=cpus,
            num_gpus=gpus,
            object_store_memory=store_mb * 2**20,
            include_dashboard=False,
            logging_level=logging.WARNING,
            _temp_dir=str(folder / INSIDE),
        )
    except BaseException:
        stop(folder)
        raise
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray takes it, and one that has come would end us at once
        signal.pthread_sigmask(signal.SIG_SETMASK, clients_done)
    _guardians[folder] = Guardian(folder, _descendants())
    return folder


def stop(folder: Path) -> None:
    """End the Ray that `start` has started, and remove its files."""
    import ray

    started = _descendants()
    ray.shutdown()
    end(started, ENDING_S)
    if guardian := _guardians.pop(folder, None):
        guardian.dismiss()
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def _descendants() -> list[psutil.Process]:
    """What Ray has started, directly or not: this process starts nothing else that stays."""
    return [one for one in psutil.Process().children(recursive=True) if _is_rays(one)]


def _is_rays(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return any(word.startswith("ray::") or "/ray/" in word for word in words)


def remove_left_behind() -> None:
    """Remove what processes left that were killed before they could: folders, and helpers of Ray's that live on."""
    for place in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for left in place.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if _is_ours(left) and (lock := _lock(left / LOCK)) is not None:
                    _end_users_of(left)
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(lock)


def _is_ours(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _lock(path: Path, flags: int = 0) -> int | None:
    """Take a lock that goes with this process; None where somebody has it, in whatever container or machine."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _end_users_of(folder: Path) -> None:
    """End every process of Ray's and of ours that has a file in the folder open."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            ours = process.uids().real == os.getuid() and _is_rays(process)
            if ours and any(file.path.startswith(f"{folder}/") for file in process.open_files()):
                process.kill()


def _folder() -> Path:
    """A new folder with this process in its name, in the system's place for such, or in /tmp if its path is long."""
    place = tempfile.gettempdir()
    short = place if len(place) <= LONGEST - len(PREFIX) else "/tmp"
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=short))
    if (lock := _lock(folder / LOCK, os.O_CREAT)) is not None:
        _locks[folder] = lock
    (folder / INSIDE).mkdir()
    return folder
