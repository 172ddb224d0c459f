"""Exit statuses and error messages of the commands."""

import os
import sys
import traceback
from collections.abc import Callable

from pflsim.engine.interrupts import Stopped
from pflsim.errors import RunError, SettingsError, in_one_line

DEBUG = "PFLSIM_DEBUG"
"""If this environment variable is set, errors are printed with their tracebacks."""


def exit_status(work: Callable[[], int | None]) -> int:
    """Run a command and print its error in one line.

    Returns:
        What `work` returns, or 0; 2 after a `SettingsError` or an `OSError`, 1 after another error, 128 + n if signal n
        stops the run, and 130 after Ctrl-C. A closed pipe on standard output is not an error.
    """
    try:
        return work() or 0
    except BrokenPipeError:
        return 0
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signum
    except Exception as error:
        if debug := os.environ.get(DEBUG):
            traceback.print_exc()
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}"
        elif not isinstance(error, RunError | SettingsError | OSError):
            text = f"an unexpected error: {in_one_line(error)}" + ("" if debug else f"; {DEBUG}=1 shows the traceback")
        print(f"error: {text}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError | OSError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
