"""Writes an HTML report on runs: the command line `pflsim report RUN…`."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pflsim.analysis.compare import target_options
from pflsim.analysis.runs import find_runs
from pflsim.records.files import write_atomically

NAME = "report.html"


def options(add: Callable[..., Any]) -> None:
    """Add the options of the command."""
    known = "a run folder, a folder of runs, a pattern, or the folder of a study of tune"
    add("runs", nargs="+", metavar="RUN", help=known)
    default = f"{NAME} in the run's folder, or in the current folder for several runs"
    add("--out", type=Path, metavar="FILE", help=f"output file; default: {default}")
    target_options(add)


def execute(options: argparse.Namespace) -> None:
    """Write an HTML report on one or several runs."""
    from pflsim.analysis.report.details import STUDY
    from pflsim.analysis.targets import parsed

    if options.target is not None:
        parsed(options.target)
    (first, *others), out = options.runs, options.out
    study = Path(first) if not others and (Path(first) / STUDY).is_file() else None
    folders = find_runs([str(study / "runs")] if study else options.runs)
    target = {"target": options.target, "target_on": options.target_on}
    print(f"report       {write_report(folders, out or (study / NAME if study else None), study, **target)}")


def write_report(folders: Sequence[Path], out: Path | None = None, study: Path | None = None, **target: Any) -> Path:
    """Write a report on runs and return its path.

    Args:
        folders: the run folders.
        out: the file; None: report.html in the folder of a single run, else in the current folder.
        study: the folder of the study of `pflsim tune` that chose the settings of the runs.
        target: `target` and `target_on` of `pflsim.analysis.comparison.compare`.

    Raises:
        SettingsError: a folder cannot be read.
    """
    from pflsim.analysis.report.page import page

    out = out or (folders[0] / NAME if len(folders) == 1 else Path(NAME))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page(folders, study, **target))
    return out
