"""The folder of a run: its name, its creation, its config.yaml, its lock; and which of several was the last."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from pflsim.errors import SettingsError
from pflsim.run_folder.files import write_atomically

CONFIG = "config.yaml"
LOCK = ".lock"
NAME = re.compile(r"(\d{8}-\d{6})-[^-]+-[^-]+-s-?\d+(?:-(\d+))?")
"""A name that `default_name` made: the time, and the number behind it where the name was taken."""


def default_name(method: str, data: str, seed: int, now: datetime) -> str:
    """The name of a run's folder: <date-time>-<method>-<data>-s<seed>, in characters that every file system takes."""
    safe = [re.sub(r"[^A-Za-z0-9._]+", "_", part) for part in (method, data)]
    return f"{now:%Y%m%d-%H%M%S}-{safe[0]}-{safe[1]}-s{seed}"


def create_run_folder(
    method: str,
    data: str,
    seed: int,
    run_dir: str | Path | None = None,
    root: str | Path = "runs",
    now: datetime | None = None,
) -> Path:
    """Create the folder of a run and claim it, so that no simultaneous run can get the same one.

    Args:
        method: the method's name, part of the default name.
        data: the data set's name, part of the default name.
        seed: the run's seed, part of the default name.
        run_dir: exactly this folder, which must be new or empty; None: a default name below `root`, with -2, -3, …
            behind it where another run has taken the name.
        root: where default names go.
        now: the time for the name; None: the clock's.

    Raises:
        SettingsError: the folder holds something already, or cannot be made.
    """
    try:
        if run_dir is not None:
            return _claim(Path(run_dir))
        Path(root).mkdir(parents=True, exist_ok=True)
        return first_free(Path(root) / default_name(method, data, seed, now or datetime.now()))
    except OSError as error:
        where = error.filename or run_dir or root
        reason = f"the run folder cannot be made: {where}: {error.strerror}"
        raise SettingsError(f"{reason}; choose another run_dir") from error


def first_free(folder: Path) -> Path:
    """Create and claim a folder of this name, or with -2, -3, … behind it where the name is taken."""
    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
    for name in names:
        try:
            name.mkdir()
        except FileExistsError:
            continue
        return _claim(name)
    raise AssertionError("there is always another number")


def _claim(folder: Path) -> Path:
    """Take an empty folder: creating its config.yaml can succeed only once."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if any(folder.iterdir()):
            raise FileExistsError
        (folder / CONFIG).open("x").close()
    except FileExistsError:
        raise SettingsError(
            f"run_dir={folder} is not empty, and a run never writes over another; give a new folder or remove this one"
        ) from None
    return folder


def write_config(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the whole resolved settings, as plain mappings, lists and scalars, to config.yaml."""
    import yaml

    write_atomically(folder / CONFIG, yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from working on a run folder for as long as this lasts, or this process does.

    On a file system without locks there is none, and nothing is kept from anyone.

    Raises:
        SettingsError: another process has the folder, or its lock file cannot be opened.
    """
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise SettingsError(f"run folder {folder} cannot be written to: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(handle)
            raise SettingsError(f"run folder {folder} is in use by another process") from None
    try:
        yield
    finally:
        os.close(handle)  # and with it the lock goes; the file stays, since another may be waiting to open it


def runs(root: str | Path = "runs") -> list[Path]:
    """The run folders below `root` that have a name given by the time and a config.yaml, in the order they started."""
    found: list[tuple[str, int, Path]] = []
    for folder in Path(root).glob("*"):
        name = NAME.fullmatch(folder.name)
        if name and _has_content(folder / CONFIG):
            found.append((name[1], int(name[2] or 1), folder))
    return [folder for _, _, folder in sorted(found)]


def last_run(root: str | Path = "runs") -> Path:
    """The run folder below `root` that was started last.

    Raises:
        SettingsError: there is none.
    """
    found = runs(root)
    if not found:
        others = sorted((path.parent for path in Path(root).glob(f"*/{CONFIG}")), key=lambda path: path.name)
        named = f"; give the folder's name, for example resume={others[-1]}" if others else ""
        raise SettingsError(f"there is no run folder in {root}{' that is named by its time' if others else ''}{named}")
    return found[-1]


def incomplete_runs(root: str | Path = "runs") -> list[Path]:
    """The run folders below `root` whose summary.json is missing or says that not all is done, in their order."""
    return [folder for folder in runs(root) if not is_complete(folder)]


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def is_complete(folder: Path) -> bool:
    """Whether the run in a folder has come to its end."""
    try:
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))["complete"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False
