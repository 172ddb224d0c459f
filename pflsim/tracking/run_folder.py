"""The folder of a run: its name, its creation, its config.yaml."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pflsim.errors import SettingsError
from pflsim.files import write_atomically

CONFIG = "config.yaml"


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
        return _first_free(Path(root) / default_name(method, data, seed, now or datetime.now()))
    except OSError as error:
        where = error.filename or run_dir or root
        reason = f"the run folder cannot be made: {where}: {error.strerror}"
        raise SettingsError(f"{reason}; choose another run_dir") from error


def _first_free(folder: Path) -> Path:
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
