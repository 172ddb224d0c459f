"""Notices when Ray's own processes end: without them nothing goes on, and Ray says so late, or ends this process."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psutil

NEEDED = ("raylet", "gcs_server")
EVERY_S = 0.2


class Watch:
    """Looks after the processes of the Ray that this process has started, until it is stopped.

    Args:
        lost: is told, once and in another thread, when one of them has ended.
    """

    def __init__(self, lost: Callable[[str], None]):
        self._lost, self._over = lost, threading.Event()
        self._watched = {one: name for one in psutil.Process().children() if (name := one.name()) in NEEDED}
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; nobody is told anything after this."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(EVERY_S):
            for one, name in self._watched.items():
                if has_ended(one):
                    self._lost(f"Ray's {name} (process {one.pid}) has ended, as when it is killed, and Ray with it")
                    return


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or a zombie that nobody has asked for its exit status."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
