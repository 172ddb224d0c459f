"""Errors in a user's own modules, classes and functions."""

from __future__ import annotations

import logging
import site
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pflsim.config.installation import FOLDER, PACKAGES
from pflsim.errors import RunError, SettingsError

OTHERS = (*(FOLDER / name for name in PACKAGES), *map(Path, site.getsitepackages()), Path(logging.__file__).parents[1])
"""Folders of this project, of installed packages and of the standard library."""


@contextmanager
def own_errors(what: str) -> Iterator[None]:
    """Raise an error of a user's code inside the block as a `SettingsError` with its line; others are unchanged."""
    try:
        yield
    except (SettingsError, RunError):
        raise
    except Exception as error:
        if not (place := place_of(error)):
            raise
        raise SettingsError(f"{what} fails: {type(error).__name__}: {error}{place}") from error


def place_of(error: BaseException) -> str:
    """Return the last line of a user's code in the traceback, as ` (FILE, line N)`; empty if there is none."""
    while error.__cause__:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename[:1] != "<" and not any(map(Path(f.filename).is_relative_to, OTHERS))]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
