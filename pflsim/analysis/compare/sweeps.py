"""Compares the runs of a sweep when it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pflsim.analysis.compare.comparison import compare_sets
from pflsim.analysis.compare.formats import render
from pflsim.analysis.results import read_run
from pflsim.config.installation import program
from pflsim.errors import SettingsError
from pflsim.run_folder.folder import is_complete


def print_comparisons(folders: Sequence[Path]) -> None:
    """Print a table for each set of complete runs that can be compared; nothing with fewer than two runs.

    An error is printed in one line and not raised, because the runs themselves succeeded.
    """
    complete = [folder for folder in folders if is_complete(folder)]
    if len(complete) < 2:
        return
    with suppress(OSError):  # standard output is closed
        try:
            found = compare_sets(read_run(folder) for folder in complete)
            print(f"\n{render(found, 'text')}\n\nmore formats and curves: {program()} compare --help", flush=True)
        except (SettingsError, ValueError, KeyError, TypeError) as error:
            print(f"the runs could not be compared: {str(error).partition(chr(10))[0]}", file=sys.stderr, flush=True)
