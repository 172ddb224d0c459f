"""A small process that outlives a run which is killed: it ends what is left of its Ray, and removes Ray's files.

Most of Ray's processes end with the run. Two agents would stay for a minute, and the files until the next run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

DONE = "done"
PATIENCE_S = 2.0
"""How long processes may take to end by themselves."""


class Guardian:
    """Stands by until it is dismissed, or this process is gone.

    Args:
        folder: to be removed when this process is gone.
        processes: to be ended then.
    """

    def __init__(self, folder: Path, processes: Iterable[psutil.Process]):
        known = [f"{one.pid}:{one.create_time()}" for one in processes if one.is_running()]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(folder), *known], stdin=subprocess.PIPE, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, cwd="/",
        )  # fmt: skip

    def dismiss(self) -> None:
        """Have it end without doing anything."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(DONE, timeout=PATIENCE_S)
        self._process.kill()
        self._process.wait()


def end(processes: Iterable[psutil.Process], patience_s: float) -> None:
    """Wait until they have ended; those that do not are killed."""
    _, left = psutil.wait_procs(list(processes), timeout=patience_s)
    for one in left:
        with suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(left, timeout=patience_s)


def main(folder: Path, known: Iterable[str]) -> None:
    """Wait for a word, or for the end of who would say it."""
    if sys.stdin.read() == DONE:
        return
    left = []
    for text in known:
        pid, _, created = text.partition(":")
        with suppress(psutil.Error):
            one = psutil.Process(int(pid))
            if one.create_time() == float(created):
                left.append(one)
    end(left, PATIENCE_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
