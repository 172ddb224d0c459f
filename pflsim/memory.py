"""Memory used by this process and its descendants, and checks that enough is free."""

from __future__ import annotations

import resource
import time
from contextlib import suppress

import psutil

from pflsim.errors import SettingsError

ADDRESS_SPACE = 6 * 10**9
"""Bytes of addresses that the driver needs: torch maps about 4 GB, and Ray about 1.5 GB."""


def check_room(what: str, needed: int, instead: str) -> None:
    """Check that enough memory is free; the kernel kills a process that takes more without a message.

    Args:
        what: what the memory is for; the error begins with it.
        needed: bytes.
        instead: advice that ends the error.

    Raises:
        SettingsError: less is free.
    """
    free = psutil.virtual_memory().available
    if needed > free:
        raise SettingsError(
            f"{what} would need {needed / 2**30:.4g} GiB of memory, but only {free / 2**30:.4g} GiB are free: {instead}"
        )


def check_address_space() -> None:
    """Check that `ulimit -v` leaves room to load torch and to start Ray, which otherwise abort or hang.

    Raises:
        SettingsError: the limit is below `ADDRESS_SPACE`.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < ADDRESS_SPACE:
        raise SettingsError(
            f"a process may use {limit / 2**30:.3g} GiB of addresses (ulimit -v), and a run needs at least "
            f"{ADDRESS_SPACE / 2**30:.3g} GiB: raise the limit, for example with ulimit -v unlimited"
        )


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
