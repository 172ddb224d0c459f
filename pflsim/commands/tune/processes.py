"""Runs the trials of a study in processes of their own, several at once."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from pflsim.commands.runner import new_runner
from pflsim.commands.sweep import IMPORTS, parallel_runs
from pflsim.config.settings import Settings
from pflsim.engine.interrupts import Stopped
from pflsim.errors import RunError, SettingsError
from pflsim.run_folder.folder import CONFIG, is_complete, run_lock
from pflsim.run_folder.resume import saved_settings
from pflsim.terminal.processes import in_processes


def run_side_by_side(runs: Sequence[Settings]) -> Iterator[tuple[int, str]]:
    """Run or resume each run; yield the numbers of those that end, with the reason of a failure, or "".

    Raises:
        RunError: after the others, if a process ended without a result; `Stopped` if there was a signal.
    """
    crashed = list[str]()
    for one in in_processes([partial(finish, run) for run in runs], parallel_runs(runs), IMPORTS):
        if one.result is not None:
            yield one.number, one.result
        else:
            killed = f" was killed by signal {-one.status}; sweep.parallel=1 needs less memory" * (one.status < 0)
            crashed.append(f"{runs[one.number].run_dir}{killed}")
            print(one.errors, end="", file=sys.stderr, flush=True)
    check_crashed(crashed)


def check_first_runs(runs: Mapping[str, Settings]) -> None:
    """Load the data and build the models and methods of runs, side by side, without running them.

    Args:
        runs: the settings by the name of the method.

    Raises:
        SettingsError: they cannot be run.
        RunError: a process ended without a result; `Stopped` if there was a signal.
    """
    functions = [partial(_problem, run) for run in runs.values()]
    for one in in_processes(functions, parallel_runs([*runs.values()]), IMPORTS):
        name = list(runs)[one.number]
        if one.result is None:
            raise RunError(f"{name}: {one.errors.strip()}")
        if one.result:
            raise SettingsError(f"{name}: {one.result}")


def _problem(settings: Settings) -> str:
    """Return why settings cannot be run, or ""."""
    try:
        importlib.import_module("ray_actors.prepare").prepare(settings)
    except SettingsError as error:
        return str(error)
    return ""


def check_crashed(crashed: Sequence[str]) -> None:
    """Raise a `RunError` if there are lines about runs that ended without a result."""
    if crashed:
        raise RunError(f"{len(crashed)} runs crashed; the same command continues:\n" + "\n".join(crashed))


def finish(settings: Settings) -> str:
    """Run settings, or resume what an earlier session has left in their folder.

    Returns:
        Why the run failed, or "".
    """
    folder = Path(str(settings.run_dir))
    if is_complete(folder):
        return ""
    started = (folder / CONFIG).is_file() and (folder / CONFIG).stat().st_size > 0
    if started:
        with run_lock(folder):  # a process of a killed study may still be saving: this is no failure of the trial
            settings = saved_settings(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)  # killed before it had written its settings
    try:
        with new_runner(settings, own_process=True) as runner:
            runner.resume(folder, settings) if started else runner.run(settings)
    except Stopped:
        raise
    except (SettingsError, RunError) as error:
        return str(error)
    return ""
