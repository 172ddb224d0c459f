"""Run folders that were fetched: known again by a mark in them, and renewed while nobody has changed what came."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

MARK = ".fetched.json"
"""Its home on the cluster, and the SHA-256 of every file that came, by its path in the folder."""


def mark(folder: Path, home: str) -> None:
    """Write down what has come into a folder.

    Args:
        folder: with nothing in it but what came.
        home: of the job, where it came from.
    """
    files = {name: _digest(folder / name) for name in _files(folder)}
    (folder / MARK).write_text(json.dumps({"home": home, "files": files}), encoding="utf-8")


def may_be_renewed(folder: Path, home: str) -> bool:
    """Whether a folder came from this home, and all that came is as it was or gone: there may be more beside it."""
    try:
        said = json.loads((folder / MARK).read_text(encoding="utf-8"))
        came: dict[str, str] = said["files"]
        there = _files(folder)
        return said["home"] == home and all(_digest(folder / name) == came[name] for name in came.keys() & there)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def renew(old: Path, new: Path, aside: Path) -> None:
    """Put a newer copy in the place of an old one. What did not come with the old one, such as a report, is kept.

    Args:
        old: which may be renewed.
        new: marked.
        aside: a path beside them where nothing is, for a moment.
    """
    came = json.loads((old / MARK).read_text(encoding="utf-8"))["files"]
    for name in _files(old) - came.keys():
        if not (new / name).exists():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(old / name, new / name)
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise


def _files(folder: Path) -> set[str]:
    """The paths of all files in a folder, without the mark and the lock of a run."""
    paths = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return paths - {MARK, ".lock"}


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
