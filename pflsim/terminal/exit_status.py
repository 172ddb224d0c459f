"""Parsers, exit statuses and error messages of the commands."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from pflsim.config.names import program
from pflsim.engine.interrupts import Stopped
from pflsim.errors import RunError, SettingsError, in_one_line

DEBUG = "PFLSIM_DEBUG"
"""If this environment variable is set, errors are printed with their tracebacks."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print an error in one line, without the usage."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def command_parser(name: str, description: str | None, examples: str = "") -> argparse.ArgumentParser:
    """Return a parser of the options of a command.

    Args:
        name: of the command.
        description: printed above the options.
        examples: printed below them; `{program}` stands for the program's name.
    """
    return _Parser(
        prog=f"{program()} {name}",
        description=description,
        epilog=examples.format(program=program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


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
