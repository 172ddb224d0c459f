"""Says on standard error what a program is doing if it takes more than two seconds; imports no other package."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")
FIRST, NEXT = 1.5, 10.0
"""Seconds without a line before the first one, and between two."""
SILENT = ("quiet", "none")
"""Values of the setting `progress` with which there are no such lines."""
_work = [""]
"""What is being done, the innermost last; the first item stands for nothing."""
_said = _ended = time.monotonic()
"""When the last line was printed, or the silence began; when the last outermost block ended."""


@contextmanager
def working(what: str, shown: bool = True) -> Iterator[None]:
    """Print a line about the block, and about those inside it, if it takes long, then every `NEXT` seconds.

    Blocks that follow each other within a second count as one. Processes of `multiprocessing` print nothing.

    Args:
        what: the work in words.
        shown: whether to print; those inside do what the outermost block does.
    """
    global _said, _ended
    level, stop = len(_work), threading.Event()
    _work.append(what)
    if shown and level == 1 and multiprocessing.parent_process() is None:
        _said = _said if time.monotonic() - _ended < 1 else time.monotonic()
        threading.Thread(target=_watch, args=(stop,), daemon=True).start()
    try:
        yield
    finally:
        stop.set()
        del _work[level:]
        _ended = time.monotonic()


def counted(items: Sequence[T], unit: str) -> Iterator[T]:
    """Yield items; the line of the block says how many of them are done."""
    level, what = len(_work) - 1, _work[-1]
    for number, item in enumerate(items):
        _work[level] = f"{what}: {number:,} of {len(items):,} {unit}"
        yield item
    _work[level] = what


def _watch(stop: threading.Event) -> None:
    global _said
    wait = max(_said + FIRST - time.monotonic(), 0)
    while not stop.wait(wait):
        with suppress(OSError, ValueError):
            print(", ".join(_work[1:]), file=sys.stderr, flush=True)
        _said, wait = time.monotonic(), NEXT
