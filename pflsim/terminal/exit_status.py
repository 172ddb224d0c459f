"""Parsers, exit statuses and error messages of the commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from pflsim.config.names import program
from pflsim.engine.interrupts import Stopped
from pflsim.errors import RunError, SettingsError


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
        What `work` returns, or 0; 1 after a `RunError`, 2 after another error, 128 + n if signal n stops the run, and
        130 after Ctrl-C. A closed pipe on standard output is not an error.
    """
    try:
        return work() or 0
    except BrokenPipeError:
        return 0
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signum
    except (RunError, SettingsError, OSError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"error: {text}", file=sys.stderr)
        return 1 if isinstance(error, RunError) else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
