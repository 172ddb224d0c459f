"""Creates, names, locks and finds run folders, and writes run.log."""

import faulthandler
import fcntl
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from pflsim.config.names import PACKAGES, written
from pflsim.errors import SettingsError
from pflsim.records.files import read_json, write_atomically

logger = logging.getLogger(__name__)
CONFIG = "config.yaml"
LOCK = ".lock"
LOG = "run.log"
STATUS = "status.txt"
MAX_PART, MAX_NAME = 40, 160
"""Characters of one part, and of all parts, of a default name."""


def create_run_folder(
    method: str,
    data: str,
    seed: int,
    run_dir: str | Path | None = None,
    root: str | Path = "runs",
    swept: Mapping[str, Any] | None = None,
) -> Path:
    """Create a run folder that no simultaneous run can use.

    Args:
        method: the method's name, part of the default name.
        data: the data set's name, part of the default name.
        seed: the run's seed, part of the default name.
        run_dir: the folder, which must be new or empty. None: <date-time>-<method>-<data>-<swept>-s<seed> below
            `root`, in portable characters, with a suffix -2, -3, … if the name exists.
        root: the parent of folders with default names.
        swept: the settings that vary in the sweep of the run, part of the default name.

    Raises:
        SettingsError: the folder is not empty, or cannot be created.
    """
    try:
        if run_dir is not None:
            return _claim(Path(os.path.expanduser(run_dir)))
        Path(root).mkdir(parents=True, exist_ok=True)
        others = {key: value for key, value in (swept or {}).items() if key not in ("method", "data", "seed")}
        parts = [method, data, *(f"{key.rpartition('.')[2]}={written(value)}" for key, value in others.items())]
        name = "-".join(re.sub(r"[^A-Za-z0-9._=+]+", "_", part)[:MAX_PART] for part in parts)[:MAX_NAME]
        return first_free(Path(root) / f"{datetime.now():%Y%m%d-%H%M%S}-{name}-s{seed}")
    except OSError as error:
        path = error.filename or run_dir or root
        raise SettingsError(f"run folder {path} cannot be created: {error.strerror}; choose another run_dir") from error


def first_free(folder: Path) -> Path:
    """Create and claim `folder`, or the first of `folder`-2, `folder`-3, … that does not exist."""
    name, number = folder, 1
    while True:
        try:
            name.mkdir()
            return _claim(name)
        except FileExistsError:
            number += 1
            name = folder.with_name(f"{folder.name}-{number}")


def _claim(folder: Path) -> Path:
    """Claim an empty folder by creating its config.yaml, which succeeds for one process only."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if any(folder.iterdir()):
            raise FileExistsError
        (folder / CONFIG).open("x").close()
    except FileExistsError:
        advice = "runs do not overwrite files; choose a new folder or remove this one"
        raise SettingsError(f"run_dir={folder} is not empty, and {advice}") from None
    return folder


def write_config(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the resolved settings (plain mappings, lists and scalars) to config.yaml."""
    import yaml

    write_atomically(folder / CONFIG, yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock a run folder against other processes until the context or the process ends.

    Does nothing on file systems without locks.

    Raises:
        SettingsError: another process holds the lock.
    """
    with (folder / LOCK).open("a") as file:  # the file stays: another process may be opening it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"run folder {folder} is in use by another process") from None
        except OSError:
            pass
        yield


@contextmanager
def run_status(folder: Path) -> Iterator[Callable[[str], object]]:
    """Keep the current step of a run in status.txt, and remove the file when the context ends.

    If the process dies, the file remains for `report_death`; after a fatal signal, `faulthandler` has added the stacks.

    Yields:
        A function that writes the step, in a few microseconds: it does not wait for the disk.
    """
    enabled = faulthandler.is_enabled()
    with (folder / STATUS).open("wb", buffering=0) as file:
        file.write(f"{'its start':199}\n".encode())
        faulthandler.enable(file)
        try:
            yield lambda step: os.pwrite(file.fileno(), f"{step[:199]:199}\n".encode(), 0)
        finally:
            faulthandler.disable()
            if enabled and sys.__stderr__:  # on a file that Python does not tell; by default on this one
                faulthandler.enable(sys.__stderr__)
            (folder / STATUS).unlink(missing_ok=True)


def report_death(folder: Path) -> None:
    """Log in one line how the process of a run died and how to continue, and its stack for run.log, if it died."""
    try:
        step, _, stack = (folder / STATUS).read_text(errors="replace").partition("\n")
        if not stack:  # the process was killed, or works and holds the lock
            with (folder / LOCK).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return
    why = f"{stack.partition(chr(10))[0]}, with the stack in {folder / STATUS}" if stack else "killed, or out of memory"
    advice = f"resume={folder} continues; if a client ends it again, add executor=ray on_client_error=drop"
    logger.warning(f"{folder}: the process died in {step.strip()}: {why}; {advice}")
    logger.debug(stack)


def last_run(root: str | Path = "runs") -> Path:
    """Return the run folder below `root` that was started last, by the time of its environment.json.

    Raises:
        SettingsError: there are no run folders.
    """
    found = max(Path(root).glob("*/environment.json"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if found is None:
        raise SettingsError(f"there is no run folder in {root}")
    return found.parent


def is_complete(folder: Path, rounds: int | None = None) -> bool:
    """Return whether summary.json of a run folder says that the run is complete.

    Args:
        folder: the run folder.
        rounds: the number of rounds that must be done, with the states after the last one saved; None: any.
    """
    summary = read_summary(folder)
    done = rounds is None or (summary.get("rounds") == rounds and summary.get("states_saved", True))
    return summary.get("complete") is True and done


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the content of summary.json; nothing if it is missing or damaged."""
    from pflsim.records.summary import SummaryFile  # imports torch

    try:
        return read_json(folder / "summary.json", SummaryFile)
    except SettingsError:
        return {}


@contextmanager
def run_log(folder: Path) -> Iterator[None]:
    """Write the records of this project's loggers to run.log and to standard error inside the block.

    Warnings have the prefix "warning: " on standard error. DEBUG records go to the file only. The root logger gets no
    record inside the block, so that its handlers do not print one twice. The first record is that of `report_death`.

    Args:
        folder: the run folder; run.log is created by the first record.
    """
    loggers, handler = [logging.getLogger(name) for name in PACKAGES], _LogHandler(folder / LOG)
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(handler)
    try:
        report_death(folder)
        yield
    finally:
        for logger, level, propagate in before:
            logger.setLevel(level)
            logger.propagate = propagate
            logger.removeHandler(handler)


class _LogHandler(logging.Handler):
    """Appends records to a file, which is open only meanwhile, and prints those from INFO on to standard error.

    Ignores errors such as a full disk or a closed standard error.
    """

    def __init__(self, path: Path):
        super().__init__()
        self._path, self._with_time = path, logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(f"{self._with_time.format(record)}\n")
        if record.levelno >= logging.INFO:
            prefix = "warning: " if record.levelno >= logging.WARNING else ""
            with suppress(OSError, ValueError):
                print(f"{prefix}{self.format(record)}", file=sys.stderr, flush=True)
