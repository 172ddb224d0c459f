"""Runs the settings of one run or of a sweep."""

from __future__ import annotations

import gc
import importlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pflsim.config.checks import check_sweep, varying_keys
from pflsim.config.components import names_client_only
from pflsim.config.compose import Composition, run_settings, to_settings
from pflsim.config.names import written
from pflsim.config.settings import Settings
from pflsim.display.identity import identity
from pflsim.engine.interrupts import Stopped
from pflsim.errors import RunError, SettingsError
from pflsim.progress import counted, doing
from pflsim.terminal.status import watching, write_status

if TYPE_CHECKING:
    from pflsim.terminal.sweep_table import SweepTable

LIGHT = "lightning_modules.quick_import"
"""Module that imports Lightning without packages that no run needs."""
T = TypeVar("T")
RUN_BYTES = 2 * 2**30
"""Free memory that `sweep.parallel=auto` wants for each run."""


def run_all(
    jobs: Sequence[Mapping[str, Any]],
    configs: Sequence[Composition],
    done: list[Path],
    own_process: bool = False,
    callbacks: Iterable[Any] = (),
) -> None:
    """Check all runs, then run them. A sweep continues after a run that fails.

    Ray starts after the run settings are checked, while the components are imported and checked.

    Args:
        jobs: the given settings of each run, for its name in messages.
        configs: the config of each run.
        done: the folders of the runs are added.
        own_process: see `new_runner`; inline runs of a sweep may then be in further processes, several at once.
        callbacks: see `pflsim.run`.

    Raises:
        SettingsError: a setting is wrong; nothing was started.
        RunError: a run failed; `Stopped` if a signal stopped it, and the runs after it were not started.
    """
    differing = _short_names(jobs)
    names = [f"[{number}/{len(jobs)}] {name}" for number, name in enumerate(differing, start=1)]
    failed = dict[int, str]()
    first = of_all(run_settings, configs, names)[0]
    if own_process and first and parallel_runs([first] * len(jobs)) > 1:
        importlib.import_module("pflsim.terminal.processes").import_early()
    with new_runner(first, own_process) as runner:
        runs = of_all(to_settings, configs, names)
        check_sweep(runs, jobs)
        if len(runs) > 1:
            kinds = [{key: value for key, value in job.items() if type(value) not in (int, float)} for job in jobs]
            # runs with equal data follow each other, so that the data are read once
            chosen = sorted({*map(kinds.index, kinds)}, key=lambda n: (str(runs[n].data), n))
            of_all(partial(runner.check, kept={}), [runs[n] for n in chosen], [names[n] for n in chosen])
        for line in dict.fromkeys(map(_found_server, configs, runs)):
            print(line, end="", flush=True)
        for settings in runs if (varying := varying_keys(jobs)) else ():
            settings.names["sweep"] = ",".join(varying)
        from pflsim.terminal.result import result_line  # imports torch
        from pflsim.terminal.sweep_table import SweepTable

        parallel = parallel_runs(runs) if own_process else 1
        with SweepTable(differing, len(runs) > 1 and runs[0].progress in ("auto", "live")) as table:
            if parallel > 1:
                _run_in_processes(names, runs, parallel, done, failed, table)
            for number, (name, settings) in enumerate(zip(names, runs, strict=True)) if parallel == 1 else ():
                if len(runs) > 1 and settings.progress != "none" and not table.shown:
                    print(name, flush=True)
                try:
                    with table.running(number):
                        done.append(runner.run(settings, callbacks))
                    if table.shown:
                        print(f"{name}: {result_line(done[-1])}", flush=True)
                except (SettingsError, RunError) as error:
                    if len(runs) == 1 or isinstance(error, Stopped):
                        raise
                    if str(error) not in failed.values():
                        print(f"error: {name}: {error}", file=sys.stderr)
                    failed[number] = str(error)
                table.ended(number, failed=number in failed)
    if failed:
        raise RunError("\n".join([f"{len(failed)} of {len(runs)} runs failed:", *_reasons(failed, names)]))


def _short_names(jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what differs between the runs: `Ditto seed=0`; the method with its name for readers."""
    keys = varying_keys(jobs)
    return [
        " ".join(identity(job[key]).display if key == "method" else f"{key}={written(job[key])}" for key in keys)
        for job in jobs
    ]


def of_all(check: Callable[[Any], T], given: Sequence[Any], names: Sequence[str]) -> list[T]:
    """Return what a function returns for each run; an error says why each run fails, see `_reasons`."""
    found, failed, cause = list[T](), dict[int, str](), None
    for number, one in enumerate(counted("checking the settings before the first run", given)):
        try:
            found.append(check(one))
        except SettingsError as error:
            failed[number], cause = str(error), error
    if failed:
        raise SettingsError("\n".join(_reasons(failed, names))) from cause
    return found


def _reasons(failed: Mapping[int, str], names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each reason, with the names of the runs that fail for it, unless these are all runs."""
    for reason in dict.fromkeys(failed.values()):
        which = [names[number] for number, own in sorted(failed.items()) if own == reason]
        yield f"{', '.join(which)}: " * (len(which) < len(names)) + reason.partition("\n")[0]


def _found_server(config: Composition, settings: Settings) -> str:
    """Return a line with the server rule of a method that is named by its client only."""
    if settings.progress in ("quiet", "none") or not names_client_only(config.config["method"]):
        return ""
    return f"method={settings.names['method']}: the server rule is {settings.method['server']['_target_']}\n"


def parallel_runs(runs: Sequence[Settings]) -> int:
    """Return how many runs of a sweep to run at the same time."""
    asked, one = runs[0].sweep.parallel, len(runs) == 1 or any(run.executor != "inline" for run in runs)
    if one or asked != "auto":
        return 1 if one else int(asked)
    from pflsim.records import limits

    if any(run.placement.gpus or run.data.get("download") for run in runs):
        return 1
    cpus = limits.usable_cpus() // max(run.placement.threads for run in runs)
    return max(1, min(len(runs), cpus, limits.free_memory() // RUN_BYTES))


def _run_in_processes(
    names: Sequence[str],
    runs: Sequence[Settings],
    parallel: int,
    done: list[Path],
    failed: dict[int, str],
    table: SweepTable,
) -> None:
    """Run each run in a process of its own, several at once; print a line when one ends, add why it failed."""
    from pflsim.terminal.processes import in_processes
    from pflsim.terminal.result import result_line

    said = set[str]()
    about = f"{len(runs)} runs, {parallel} at the same time (sweep.parallel)"
    print(f"{about}; each prints a line when it ends", flush=True)
    for one in in_processes([partial(run_alone, run, table.path(n)) for n, run in enumerate(runs)], parallel):
        table.ended(one.number, failed=one.result is None)
        if one.result is not None:
            done.append(one.result)
            print(f"{names[one.number]}: {result_line(one.result)}", flush=True)
        else:
            failed[one.number] = f"\n{one.errors}".rpartition("\nerror: ")[2].strip()
            hints = [line for line in one.output.splitlines() if line.startswith("resume with")]
            print("\n".join([names[one.number], *hints]), file=sys.stderr)
        if one.errors not in said:
            print(one.errors, end="", file=sys.stderr, flush=True)
        said.add(one.errors)


def run_alone(settings: Settings, status: Path | None = None) -> Path:
    """Run settings in a process that does nothing else, and return the run folder.

    Args:
        settings: of the run.
        status: a file for the status after each round, which the run then does not print; None: there is none.
    """
    watching.set(partial(write_status, status) if status else None)
    with new_runner(settings, own_process=True) as runner:
        return runner.run(settings)


def new_runner(first: Settings | None, own_process: bool) -> Any:
    """Return a `ray_actors.run.Runner`.

    Args:
        first: the settings of its first run, for the start of Ray; None: they are not known yet.
        own_process: whether this process does nothing but runs: then packages that no run needs are not imported, and
            garbage collections leave out what is imported, which stays (a third of a short run's CPU time).
    """
    doing("importing PyTorch and preparing the run")
    early, state = None, random.getstate()
    # Not with GPUs, which are looked for by torch.
    if first is not None and first.executor == "ray" and not (first.ray_address or first.placement.gpus):
        early = importlib.import_module("ray_actors.cluster").start_early(first)
    try:
        if own_process:
            importlib.import_module(LIGHT)
        runner = importlib.import_module("ray_actors.run").Runner(early)
        if own_process and not gc.get_freeze_count():
            gc.freeze()
        return runner
    except BaseException:
        if early is not None:
            early.close()
        raise
    finally:
        random.setstate(state)  # some libraries draw from it when they are imported
