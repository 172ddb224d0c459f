"""Output streams with closed readers."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, TextIO


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
