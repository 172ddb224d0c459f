"""What a stream can take, and streams that nobody reads any more."""

from __future__ import annotations

import os
from typing import TextIO


def can_print(text: str, stream: TextIO) -> bool:
    """Whether a stream's encoding has all of the characters."""
    try:
        text.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def let_go(stream: TextIO) -> None:
    """Where nobody reads it any more, have Python not stumble over that at its end."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
