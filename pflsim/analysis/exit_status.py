"""Exit statuses and error messages of the commands that read runs."""

from __future__ import annotations

import sys
from collections.abc import Callable

from pflsim.errors import RunError, SettingsError


def exit_status(work: Callable[[], None]) -> int:
    """Run a command and print its error in one line.

    Returns:
        0, or 1 after a `RunError`, or 2 after another error. A closed pipe on standard output is not an error.
    """
    try:
        work()
    except BrokenPipeError:
        return 0
    except (RunError, SettingsError, OSError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"error: {text}", file=sys.stderr)
        return 1 if isinstance(error, RunError) else 2
    return 0
