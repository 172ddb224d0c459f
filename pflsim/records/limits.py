"""What the machine and the container of this process allow it to use."""

import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from pflsim.errors import SettingsError

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""Where Linux shows control groups, with which containers and batch systems limit processes, and those of a process."""


FILES, FILES_PER_ACTOR = 128, 8
"""Files that one of Ray's processes opens, without actors and for each actor; measured: 50 and 5."""


def check_limits(actors: int) -> None:
    """Raise the limit of open files to what Ray needs, because Ray would wait for it without a message.

    Raises:
        SettingsError: this process may not raise it that far.
    """
    files, (soft, hard) = FILES + FILES_PER_ACTOR * actors, resource.getrlimit(resource.RLIMIT_NOFILE)
    most = math.inf if hard == resource.RLIM_INFINITY else hard
    if most < files:
        needed = f"for {actors} client actors Ray needs {files} open files, and this process may have {most}"
        raise SettingsError(f"{needed}: ulimit -n {files}, or executor=inline, which needs no Ray")
    if soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use; macOS only knows those of the machine."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = (*_read("cpu", "cpu.max"), *_read("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return max(1, min([cpus, *(math.ceil(quota / period) for quota, period in limits if quota > 0)]))


def free_memory() -> int:
    """Return the bytes of memory that this process may still use."""
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limits = [found for pair in names for found in _read("memory", *pair, "memory.stat")]
    return max(0, min([psutil.virtual_memory().available, *(most - used + cache for most, used, cache in limits)]))


def _read(controller: str, *names: str) -> Iterator[list[int]]:
    """Yield the numbers in files of every control group that this process is in; none for groups without a limit.

    Of memory.stat it is the size of the files in the cache, which Linux removes if memory is needed.
    """
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or controller in controllers.split(","):
            for group in (Path(path), *Path(path).parents):
                folder = GROUPS / controllers / group.relative_to("/")
                with suppress(OSError, ValueError):
                    texts = [(folder / name).read_text() for name in names]
                    cached = [text.rpartition("inactive_file ")[2] if "\n" in text.strip() else text for text in texts]
                    yield [int(number) for text in cached for number in text.splitlines()[0].split()]
