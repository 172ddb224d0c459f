"""Says on standard error what a program is doing if that takes more than two seconds."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

FIRST, NEXT, STEP = 1.5, 10.0, 0.2
"""Seconds of work before the first line and between two lines; how often to look whether one is due."""
_doing, _due = "", 0.0


@contextmanager
def watched(progress: str | None) -> Iterator[None]:
    """Print lines about what takes long inside the block, unless the setting `progress` asks for no such output."""
    stop = threading.Event()
    doing("")
    if progress not in ("quiet", "none"):
        threading.Thread(target=_watch, args=(stop,), daemon=True).start()
    try:
        yield
    finally:
        stop.set()


def doing(what: str) -> str:
    """Say what is done from now on; "" is what prints lines itself. Return what was done before."""
    global _doing, _due
    _due, before = _due if _doing else time.monotonic() + FIRST, _doing
    _doing = what
    return before


def counted(what: str, items: Sequence[Any]) -> Iterator[Any]:
    """Yield items, and say how many of them are done."""
    for number, item in enumerate(items):
        doing(f"{what}: {number:,} of {len(items):,}" if len(items) > 1 else what)
        yield item


def _watch(stop: threading.Event) -> None:
    global _due
    while not stop.wait(STEP):
        if _doing and time.monotonic() > _due:
            with suppress(OSError, ValueError):  # it is closed
                print(_doing, file=sys.stderr, flush=True)
            _due = time.monotonic() + NEXT
