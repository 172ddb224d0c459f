"""run.log: the log records of a run, which also go to standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOG = "run.log"
PACKAGES = ("pflsim", "lightning_modules", "ray_actors")


@contextmanager
def run_log(folder: Path) -> Iterator[None]:
    """Write the records of this project's loggers to run.log and to standard error inside the block.

    Warnings have the prefix "warning: " on standard error. DEBUG records go to the file only. The root logger gets no
    record inside the block, so that its handlers do not print one twice.

    Args:
        folder: the run folder; run.log is created by the first record.
    """
    loggers, handler = [logging.getLogger(name) for name in PACKAGES], _Handler(folder / LOG)
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.setLevel(level)
            logger.propagate = propagate
            logger.removeHandler(handler)


class _Handler(logging.Handler):
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
