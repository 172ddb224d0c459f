"""`python launch.py report RUN…` writes one page about runs: figures, curves, settings, and how to run them again."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pflsim.analysis.results import find_runs
from pflsim.errors import SettingsError
from pflsim.run_folder.files import write_atomically

NAME = "report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page.

    Returns:
        The exit status: 2, there is nothing to report, or the runs cannot be compared.
    """
    options = _options(arguments)
    try:
        folders = find_runs(options.runs)
        out = options.out or (folders[0] / NAME if len(folders) == 1 else Path(NAME))
        from pflsim.analysis.report.page import page

        text = page(folders, options.anyway)
        try:
            write_atomically(out, text)
        except OSError as error:
            raise SettingsError(f"--out {out} cannot be written: {error.strerror}") from error
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"report       {out}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python launch.py report",
        description="Write one page about one or several runs, to be opened in a browser.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, a pattern, or a folder of run folders")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"where to; default: {NAME} in the run's folder, or "
                        "here for several runs")  # fmt: skip
    parser.add_argument("--anyway", action="store_true", help="also where the runs cannot be compared")
    return parser.parse_args(arguments)
