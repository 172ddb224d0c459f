"""Detects when Ray's own processes end. Ray would report it late, or end this process without a message."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psutil

REQUIRED_PROCESSES = ("raylet", "gcs_server")
INTERVAL_S = 0.2


class Watch:
    """Watches the processes of the Ray that this process has started, until `stop`.

    Args:
        on_loss: called once, in another thread and with the reason, when one of them has ended.
    """

    def __init__(self, on_loss: Callable[[str], None]):
        self._on_loss, self._stopped = on_loss, threading.Event()
        self._processes = {p: name for p in psutil.Process().children() if (name := p.name()) in REQUIRED_PROCESSES}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; `on_loss` is not called after this."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            for process, name in self._processes.items():
                if has_ended(process):
                    self._on_loss(f"Ray's {name} (process {process.pid}) has ended, so the run cannot continue")
                    return


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, including a zombie whose exit status was not read yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
