"""A small process that cleans up after a run that is killed: it ends Ray's processes and removes Ray's files.

Most of Ray's processes end together with the run. Two agents would stay for a minute, and the files until the next run.
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
TIMEOUT_S = 2.0
"""How long processes may take to end by themselves."""


class Guardian:
    """Waits in its own process until this process dismisses it or ends.

    Args:
        folder: removed when this process ends.
        processes: ended when this process ends.
    """

    def __init__(self, folder: Path, processes: Iterable[psutil.Process]):
        identities = [f"{process.pid}:{process.create_time()}" for process in processes if process.is_running()]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(folder), *identities], stdin=subprocess.PIPE, text=True, cwd="/",
            start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def dismiss(self) -> None:
        """End the guardian without any cleaning."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(DONE, timeout=TIMEOUT_S)
        self._process.kill()
        self._process.wait()


def end_processes(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """Wait for processes to end, and kill those that do not."""
    _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=timeout_s)


def main(folder: Path, identities: Iterable[str]) -> None:
    """Wait until stdin is closed, then clean up unless the guardian was dismissed."""
    if sys.stdin.read() == DONE:
        return
    processes = []
    for identity in identities:
        pid, _, created = identity.partition(":")
        with suppress(psutil.Error):
            process = psutil.Process(int(pid))
            if process.create_time() == float(created):  # the system may have given the id to another process
                processes.append(process)
    end_processes(processes, TIMEOUT_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
