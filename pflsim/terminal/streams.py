"""What a stream can take, and streams that nobody reads any more."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, TextIO


def can_print(text: str, stream: TextIO) -> bool:
    """Whether a stream's encoding has all of the characters."""
    try:
        text.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def detach_if_closed(stream: TextIO) -> None:
    """Where nobody reads it any more, have Python not stumble over that at its end."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class IgnoreClosedPipe:
    """A stream whose reader may go away, like a terminal that is closed: what it does not take any more is dropped."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write it, or nothing."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush it, or nothing."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
