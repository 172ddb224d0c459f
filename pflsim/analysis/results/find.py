"""Which run folders the arguments of a command mean."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from pflsim.config.urls import is_url
from pflsim.errors import SettingsError
from pflsim.run_folder.folder import CONFIG


def find_runs(arguments: Sequence[str]) -> list[Path]:
    """The run folders that paths and patterns stand for, each once, in the order given; those of a pattern by name.

    A folder that is no run but has runs in it stands for all of them.

    Raises:
        SettingsError: an argument stands for no run; names it.
    """
    found: list[Path] = []
    for argument in arguments:
        if is_url(argument):
            raise SettingsError(f"{argument}: expected folders on this machine; copy the run into one first")
        paths = [Path(argument)] if Path(argument).exists() else [Path(p) for p in sorted(glob.glob(argument))]
        runs = [run for path in paths for run in _runs(path)]
        if not runs:
            missing = "there is no such folder" if glob.escape(argument) == argument else "there is no folder that fits"
            why = "is no run folder and has none in it" if paths else missing
            raise SettingsError(f"{argument}: {why}")
        found += runs
    return list({path.resolve(): path for path in found}.values())


def _runs(path: Path) -> list[Path]:
    if (path / CONFIG).is_file():
        return [path]
    return sorted(inner.parent for inner in path.glob(f"*/{CONFIG}")) if path.is_dir() else []
