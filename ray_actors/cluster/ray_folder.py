"""Folders for the files of a local Ray, and the removal of those that killed processes have left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ray_actors.cluster.guardian import end_processes, users_of

PREFIX = "pflsim-ray-"
MAX_PATH_LENGTH = 28
"""Of the folder, in characters: the path of a socket in it must not exceed 107 characters."""
FILES, LOCK = "r", "lock"
"""In the folder, which only this user can open: Ray's folder, and a file that this process locks as long as it lives.
Ray's own folder is open to all users."""
UNLOCKED_S = 60
"""The age of a folder without a lock file, in seconds, from which its process was killed before it could lock it."""
_locks: dict[Path, int] = {}


def create_folder() -> tuple[Path, Path]:
    """Create and lock a folder; return it and the folder for Ray's files in it.

    The folder is in the system's folder for temporary files, or in /tmp if the path of that is too long.
    """
    parent = tempfile.gettempdir()
    if len(parent) > MAX_PATH_LENGTH - len(PREFIX):
        parent = "/tmp"
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    if (lock := _lock(folder / LOCK, os.O_CREAT)) is not None:
        _locks[folder] = lock
    (folder / FILES).mkdir()
    return folder, folder / FILES


def remove_folder(folder: Path) -> None:
    """Remove a folder that `create_folder` has created, and release its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    if (lock := _locks.pop(folder, None)) is not None:
        os.close(lock)


def remove_leftovers() -> None:
    """Remove the folders of processes that were killed, and end the Ray processes that still use them."""
    for parent in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for folder in parent.glob(f"{PREFIX}*"):
            with suppress(OSError):
                create = os.O_CREAT if time.time() > folder.lstat().st_mtime + UNLOCKED_S else 0
                if _is_ours(folder) and (lock := _lock(folder / LOCK, create)) is not None:
                    end_processes(users_of(folder), 0)
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)


def _is_ours(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _lock(path: Path, flags: int = 0) -> int | None:
    """Lock a file until this process ends; return None if another process, in whatever container, holds the lock."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
