"""A Ray of our own on this machine: reachable from nowhere else, quiet, and gone without a trace when it ends."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from ray_actors.guardian import Guardian, end

LONGEST = 30
"""Characters of the folder for Ray's files: the sockets in it may have paths of 107 with what Ray puts behind it."""
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
    try:
        ray.init(
            address="local",
            _node_ip_address="127.0.0.1",
            num_cpus=cpus,
            num_gpus=gpus,
            object_store_memory=store_mb * 2**20,
            include_dashboard=False,
            logging_level=logging.WARNING,
            _temp_dir=str(folder),
        )
    except BaseException:
        stop(folder)
        raise
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
            pid = left.name.removeprefix(PREFIX).partition("-")[0]
            with suppress(OSError):
                if pid.isdigit() and not psutil.pid_exists(int(pid)) and left.stat().st_uid == os.getuid():
                    _end_users_of(left)
                    shutil.rmtree(left, ignore_errors=True)


def _end_users_of(folder: Path) -> None:
    """End every process of ours that has a file in the folder open."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.uids().real == os.getuid() and any(
                f.path.startswith(f"{folder}/") for f in process.open_files()
            ):
                process.kill()


def _folder() -> Path:
    """A new folder with this process in its name, in the system's place for such, or in /tmp if its path is long."""
    place = tempfile.gettempdir()
    short = place if len(place) <= LONGEST - len(PREFIX) else "/tmp"
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=short))
