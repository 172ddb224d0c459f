"""Writes an HTML report on runs: the command line `pflsim report RUN…`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pflsim.analysis.runs import find_runs
from pflsim.records.files import write_atomically
from pflsim.terminal.exit_status import command_parser, exit_status

NAME = "report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0, or 2 after an error.
    """
    parser = command_parser("report", "Write an HTML report on one or several runs.")
    known = "a run folder, a folder of runs, a pattern, or the folder of a study of tune"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=known)
    default = f"{NAME} in the run's folder, or in the current folder for several runs"
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"output file; default: {default}")
    options = parser.parse_args(arguments)
    return exit_status(lambda: print(f"report       {_report(options.runs, options.out)}"))


def _report(arguments: Sequence[str], out: Path | None) -> Path:
    from pflsim.analysis.report.facts import STUDY

    study = Path(arguments[0]) if len(arguments) == 1 and (Path(arguments[0]) / STUDY).is_file() else None
    folders = find_runs([str(study / "runs")] if study else arguments)
    return write_report(folders, out or (study / NAME if study else None), study)


def write_report(folders: Sequence[Path], out: Path | None = None, study: Path | None = None) -> Path:
    """Write a report on runs and return its path.

    Args:
        folders: the run folders.
        out: the file; None: report.html in the folder of a single run, else in the current folder.
        study: the folder of the study of `pflsim tune` that chose the settings of the runs.

    Raises:
        SettingsError: a folder cannot be read.
    """
    from pflsim.analysis.report.page import page

    out = out or (folders[0] / NAME if len(folders) == 1 else Path(NAME))
    write_atomically(out, page(folders, study))
    return out
