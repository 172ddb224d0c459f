"""Finds the run folders that a command's arguments name."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from pflsim.config.urls import is_url
from pflsim.errors import SettingsError
from pflsim.run_folder.folder import CONFIG


def find_runs(arguments: Sequence[str]) -> list[Path]:
    """Return the run folders that paths and patterns name, each once, in the order given.

    The matches of a pattern are sorted by name. A folder that contains run folders names all of them.

    Raises:
        SettingsError: an argument names no run.
    """
    found: list[Path] = []
    for argument in arguments:
        if is_url(argument):
            raise SettingsError(f"{argument}: expected a local folder; copy the run to this machine first")
        paths = [Path(argument)] if Path(argument).exists() else [Path(p) for p in sorted(glob.glob(argument))]
        runs = [run for path in paths for run in _runs(path)]
        if not runs:
            missing = "no such folder" if glob.escape(argument) == argument else "no folder matches this pattern"
            why = "neither a run folder nor a folder of runs" if paths else missing
            raise SettingsError(f"{argument}: {why}")
        found += runs
    return list({path.resolve(): path for path in found}.values())


def _runs(path: Path) -> list[Path]:
    if (path / CONFIG).is_file():
        return [path]
    return sorted(inner.parent for inner in path.glob(f"*/{CONFIG}")) if path.is_dir() else []
