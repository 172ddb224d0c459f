"""A small process that cleans up after a run that is killed: it ends Ray's processes and removes Ray's files.

Most of Ray's processes end together with the run. Two agents would stay for a minute, and the files until the next run.
If the run is killed while Ray starts, nothing ends by itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

DONE = "done"
TIMEOUT_S = 2.0
"""How long processes may take to end by themselves."""
QUIET_S = 1.0
"""How long no process may use the folder before it is clean: one that was being started may begin to use it."""


class Guardian:
    """Waits in its own process until this process dismisses it or ends.

    Args:
        folder: of Ray's files. When this process ends, Ray's processes that use it are ended, and it is removed.
    """

    def __init__(self, folder: Path):
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__)), str(folder)], stdin=subprocess.PIPE, text=True, cwd="/",
            start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def dismiss(self) -> None:
        """End the guardian without any cleaning."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(DONE, timeout=TIMEOUT_S)
        self._process.kill()
        self._process.wait()


def is_ray_process(process: psutil.Process) -> bool:
    """Return whether a process belongs to Ray, judging by its command line."""
    try:
        return any(word.startswith("ray::") or "/ray/" in word for word in process.cmdline())
    except psutil.Error:
        return False


def users_of(folder: Path) -> list[psutil.Process]:
    """Return the Ray processes of this user that have the folder in their command line, or a file in it open."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.uids().real != os.getuid() or not is_ray_process(process):
                continue
            named = any(f"{folder}/" in word for word in process.cmdline())
            if named or any(file.path.startswith(f"{folder}/") for file in process.open_files()):
                found.append(process)
    return found


def end_processes(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """Wait for processes to end, and kill those that do not."""
    _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=timeout_s)


def main(folder: Path) -> None:
    """Wait until stdin is closed, then clean up unless the guardian was dismissed."""
    if sys.stdin.read() == DONE:
        return
    end_processes(users_of(folder), TIMEOUT_S)
    quiet_since = time.monotonic()
    while time.monotonic() < quiet_since + QUIET_S:
        if users := users_of(folder):
            end_processes(users, 0)
            quiet_since = time.monotonic()
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
