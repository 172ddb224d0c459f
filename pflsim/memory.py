"""How much memory this process and everything it started hold, and whether there is room for more."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from pflsim.errors import SettingsError


def check_room(what: str, needed: int, instead: str) -> None:
    """Refuse what this machine has no memory for, before it is asked for: a process that takes more is killed unheard.

    Args:
        what: what would be held, as the message begins.
        needed: bytes.
        instead: what to do about it.

    Raises:
        SettingsError: more than is free now.
    """
    free = psutil.virtual_memory().available
    if needed > free:
        raise SettingsError(
            f"{what} would take {needed / 2**30:.4g} GiB of memory, and this machine has {free / 2**30:.4g} GiB free: "
            f"{instead}"
        )


def held_mb() -> float:
    """Memory of this process and all its descendants together, in MB of 10⁶ bytes.

    Per process the proportional set size (PSS: a page shared by k processes counts 1/k in each) where Linux lets us
    read `smaps_rollup`, else the resident set size, which counts shared pages in every process.
    """
    own = psutil.Process()
    return sum(_process_bytes(process) for process in [own, *own.children(recursive=True)]) / 1e6


def _process_bytes(process: psutil.Process) -> int:
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


class MemorySampler:
    """Remembers the largest of the samples taken. What happens between two samples is not seen.

    Args:
        share: the largest part of the time that sampling may take; calls that come sooner are skipped.
    """

    def __init__(self, share: float = 0.01):
        self.share = share
        self.last_mb = 0.0
        self.peak_mb = 0.0
        self._due = 0.0

    def sample(self, force: bool = False) -> float:
        """Take a sample unless it is too soon, and return the latest one in MB."""
        start = time.perf_counter()
        if force or start >= self._due:
            self.last_mb = held_mb()
            self.peak_mb = max(self.peak_mb, self.last_mb)
            end = time.perf_counter()
            self._due = end + (end - start) / self.share
        return self.last_mb
