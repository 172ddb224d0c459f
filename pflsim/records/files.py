"""Writes files so that readers never see incomplete content."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Write a temporary file in the same folder, fsync it, and rename it to `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
