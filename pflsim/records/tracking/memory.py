"""Memory used by this process and its descendants."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil


def held_mb() -> float:
    """Return the memory of this process and all its descendants, in MB (10⁶ bytes).

    Uses the proportional set size of each process (a page shared by k processes counts 1/k in each) where Linux
    permits reading it, else the resident set size, which counts shared pages in every process.
    """
    own = psutil.Process()
    return sum(_process_bytes(process) for process in [own, *own.children(recursive=True)]) / 1e6


def _process_bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error, AttributeError):  # not permitted, or not Linux
        return process.memory_full_info().pss
    with suppress(psutil.Error):
        return process.memory_info().rss
    return 0


class MemorySampler:
    """Samples memory use and keeps the peak. Peaks between two samples are missed.

    Args:
        share: the maximum share of the time to spend on sampling; calls that come too soon are skipped.
    """

    def __init__(self, share: float = 0.01):
        self.share = share
        self.last_mb = 0.0
        self.peak_mb = 0.0
        self._due = 0.0

    def sample(self, force: bool = False) -> float:
        """Take a sample unless it is too soon, and return the latest sample in MB."""
        start = time.perf_counter()
        if force or start >= self._due:
            self.last_mb = held_mb()
            self.peak_mb = max(self.peak_mb, self.last_mb)
            end = time.perf_counter()
            self._due = end + (end - start) / self.share
        return self.last_mb
