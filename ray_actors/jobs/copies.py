"""Run folders that were fetched: known again by a mark, and brought up to date file by file while nobody changed them.

Whatever happens on the way, what is in a folder can be taken up, and a later fetch goes on: new checkpoints come
first, what is gone there goes last, and the mark knows every file as it was and as it will be. What others have put
into the folder is not touched.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pflsim.errors import SettingsError
from pflsim.run_folder.folder import CONFIG, is_complete, run_lock
from ray_actors.jobs.sender import MARK, RECORDS

ANOTHER = "it is another run than the one there"
CHECKPOINTS, META, SUMMARY = "checkpoints/", "/meta.json", "summary.json"


@dataclass(frozen=True)
class Mark:
    """What has come into a folder.

    Args:
        checkpoints: whether all that were there have come.
        files: the SHA-256 that a file may have, by its path in the folder.
    """

    checkpoints: bool
    files: Mapping[str, Sequence[str]]


def put(new: Path, place: Path, checkpoints: bool) -> str:
    """Put a fetched run folder into its place, or bring what was fetched before up to date.

    Args:
        new: with nothing in it but what has come.
        place: where it goes; there may be an older copy.
        checkpoints: whether they were asked for. If not, those that came before stay.

    Returns:
        Why what is there was left as it is; empty if it was not.
    """
    if not os.path.lexists(place):
        _write(new, Mark(checkpoints, {name: [digest] for name, digest in _digests(new).items()}))
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.rename(place)
            return ""
        except OSError:
            if not place.is_dir():
                raise  # otherwise another fetch was faster
    if mark(place) is None:
        return "it was not brought by fetch"
    try:
        with run_lock(place):
            return _update(new, place, checkpoints)
    except SettingsError as error:
        return str(error)


def is_settled(folder: Path, checkpoints: bool) -> bool:
    """Whether nothing can come into a folder: all of a complete run has, or it is not fetch's."""
    known = mark(folder)
    return known is None or (is_complete(folder) and (known.checkpoints or not checkpoints))


def mark(folder: Path) -> Mark | None:
    """The mark of a folder; None where there is none that can be read."""
    try:
        said: dict[str, Any] = json.loads((folder / MARK).read_text(encoding="utf-8"))
        files = {str(name): [str(digest) for digest in digests] for name, digests in said["files"].items()}
        return Mark(said["checkpoints"] is True, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _update(new: Path, place: Path, checkpoints: bool) -> str:
    before = mark(place)
    assert before is not None
    came, files = before.files, _digests(new)
    try:
        here = {name: _digest(place / name) for name in {*came, *files}}
    except OSError as error:
        return f"{error.filename} is in the way ({error.strerror})"
    for name, digest in sorted(here.items()):
        if digest and digest not in (*came.get(name, ()), files.get(name)):
            return f"{name} was changed here" if name in came else f"{name} is here already, and comes from there too"
    if why := _another(new, place):
        return why
    stay = {name: digests for name, digests in came.items() if name.startswith(CHECKPOINTS) and not checkpoints}
    _write(place, Mark(False, {name: [*came.get(name, ()), *filter(None, [files.get(name)])] for name in here}))
    for name in sorted(files, key=_turn):
        if here[name] != files[name]:
            _move(new / name, place / name)
    for name in sorted(came.keys() - files.keys() - stay.keys(), key=lambda name: (not name.endswith(META), name)):
        (place / name).unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty
            (place / name).parent.rmdir()
    _write(place, Mark(checkpoints, {**stay, **{name: [digest] for name, digest in files.items()}}))
    return ""


def _another(new: Path, place: Path) -> str:
    """Why a copy is not a later one of the same run: by the first line of its records, whose seconds no two share."""
    old, now = _contents(place / RECORDS[0]), _contents(new / RECORDS[0])
    first, ended, _ = old.partition(b"\n")
    same = now.startswith(first + ended) if ended else _contents(place / CONFIG) == _contents(new / CONFIG)
    if not same:
        return ANOTHER
    return "it has more rounds than there are there now" if len(now) < len(old) and old.startswith(now) else ""


def _turn(name: str) -> tuple[int, str]:
    """Checkpoints, each with its meta.json last; then the records; last of all what says whether it is complete."""
    if name.startswith(CHECKPOINTS):
        return int(name.endswith(META)), name
    return 3 if name == SUMMARY else 2, name


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        part = target.with_name(f".{target.name}.part")  # the folder is a link to another disk
        shutil.copyfile(source, part)
        part.replace(target)


def _write(folder: Path, known: Mark) -> None:
    part = folder / f"{MARK}.part"
    part.write_text(json.dumps({"checkpoints": known.checkpoints, "files": dict(known.files)}), encoding="utf-8")
    part.replace(folder / MARK)


def _digests(folder: Path) -> dict[str, str]:
    """Of all files in a folder where nothing is but what has come."""
    paths = [Path(at) / name for at, _, names in os.walk(folder) for name in names]
    return {path.relative_to(folder).as_posix(): _digest(path) for path in paths if path.name != MARK}


def _digest(path: Path) -> str:
    """The SHA-256 of a file, empty where nothing is.

    Raises:
        OSError: it cannot be read, or is no plain file.
    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "no plain file", str(path))
    except FileNotFoundError:
        return ""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _contents(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
