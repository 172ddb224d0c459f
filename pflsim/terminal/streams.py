"""Output streams with closed readers."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO


def open_closed() -> None:
    """Connect standard streams that the parent process has closed (`>&-`) to the null device.

    Otherwise the next file that is opened would get the stream's number, and with it what libraries print.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def detach_if_closed(stream: TextIO) -> None:
    """Redirect a stream whose reader is gone to the null device, so that Python does not fail on it at exit."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class IgnoreClosedPipe:
    """Wraps a stream and drops its output once the reader is gone, e.g. a closed terminal."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text; ignore errors of the operating system."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; ignore errors of the operating system."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
