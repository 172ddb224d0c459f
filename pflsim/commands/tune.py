"""The command line `pflsim tune method=a,b …`: tunes methods with equal budgets, then compares them."""

from __future__ import annotations

import argparse
import importlib
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pflsim.commands.resume import resume_run
from pflsim.commands.sweep import of_all, parallel_runs, run_alone
from pflsim.config.compose import config_folders, parse
from pflsim.config.names import listed
from pflsim.config.settings import Settings
from pflsim.engine.interrupts import Stopped
from pflsim.errors import RunError, SettingsError
from pflsim.records.files import write_atomically
from pflsim.records.folder import CONFIG, is_complete, run_lock
from pflsim.terminal.processes import in_processes
from pflsim.terminal.status import watching, write_status
from pflsim.terminal.sweep_table import SweepTable

if TYPE_CHECKING:
    from pflsim.commands.tune_study import Method, Study

EXAMPLES = """examples:
  {program} tune method=local,fedavg,ditto rounds=40 --rounds 200 --into tuned
  {program} tune method=fedavg,ditto 'search.lr=[0.01,0.1]' 'search.ditto.lam={{low:0.1,high:10,log:true}}' --into tuned

Every method gets the same number of trials: first its defaults, then values that Optuna suggests. The values with the
best validation accuracy run with other seeds, and these runs are compared. search.KEY (of all methods) and
search.METHOD.KEY take a list of choices, a range, or null: no search. sweep.parallel=N runs work at the same time.
The same command continues a study that was stopped.
"""


def options(add: Callable[..., Any]) -> None:
    """Add the options of the command."""
    add("settings", nargs="+", metavar="SETTING", help="method=a,b and other settings")
    add("--trials", type=positive, default=12, metavar="N", help="trials of each method; default: 12")
    add("--seeds", type=positive, default=3, metavar="N", help="runs of the chosen values of a method; default: 3")
    add("--rounds", type=positive, metavar="N", help="rounds of these runs; default: rounds=, those of the trials")
    add("--into", type=Path, required=True, metavar="DIR", help="folder of the study, for its runs and tuned.md")
    add("--config-dir", action="append", default=[], metavar="DIR", help="look for groups in DIR too; may be repeated")


def execute(options: argparse.Namespace) -> None:
    """Tune methods on validation data with equal budgets, then compare them with other seeds."""
    run_study(options.into, vars(options) | {"settings": parse(options.settings)})


def positive(text: str) -> int:
    """Return a whole number >= 1 of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number >= 1")
    return int(text)


def run_study(folder: Path, options: Mapping[str, Any]) -> list[Path]:
    """Run a study, or continue it; returns the folders of the runs of the chosen values.

    Args:
        folder: of the study.
        options: of the command line; `settings` by dotted key.

    Raises:
        SettingsError: a setting or a space is wrong, or the folder has another study.
        RunError: a method or a run is missing in the comparison.
    """
    try:
        import optuna
    except ImportError:
        raise SettingsError("tune needs the package optuna: pip install 'pflsim[tune]'") from None
    from pflsim.commands.tune_study import Study, methods_of

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", message="Choices for a categorical distribution")  # lists, which JSON stores
    methods = methods_of(options["settings"], config_folders(options["config_dir"]))
    for method in methods if options["rounds"] else ():  # `methods_of` has checked the rounds of the trials
        method.settings({"rounds": options["rounds"]})
    folder.mkdir(parents=True, exist_ok=True)
    with run_lock(folder):
        study = Study(folder, options, methods)
        if not any(map(study.trials, methods)):
            check_first_runs(methods)
        return _run(study)


def _run(study: Study) -> list[Path]:
    """Run the trials, then the chosen values with the other seeds; print and write the tables; returns these runs."""
    study.write()
    first = [method.settings({}) for method in study.methods]
    live = first[0].progress in ("auto", "live")
    ended = sum(trial.state.is_finished() for method in study.methods for trial in study.trials(method))
    with SweepTable(["trial"] * (study.budget * len(first) - ended), live) as table:
        for number, reason in side_by_side(study.ask(), parallel_runs(first * study.budget), table):
            print(study.tell(number, reason), flush=True)
            study.write()
    failed = [f"{m.name}: all trials failed, so it has no runs" for m in study.methods if not study.chosen(m)]
    runs = study.final_runs()
    failed += run_or_resume(runs, live)
    done = [folder for run in runs if is_complete(folder := Path(str(run.run_dir)))]
    text, page = _tables(study, done)
    write_atomically(study.folder / "tuned.md", f"{page}\n")
    print(f"\n{text}\n\nwritten: {study.folder / 'tuned.json'}, {study.folder / 'tuned.md'}", flush=True)
    if failed:
        raise RunError("\n".join(failed))
    return done


def run_or_resume(runs: Sequence[Settings], live: bool) -> list[str]:
    """Run or resume each run, see `side_by_side`, and print a line when one ends; return why runs failed."""
    from pflsim.terminal.result import result_line

    failed, parallel = list[str](), parallel_runs(runs) if runs else 0
    with SweepTable(["run"] * len(runs), live) as table:
        if runs and not table.shown:  # a live table needs a terminal
            print(f"{len(runs)} runs, {parallel} at the same time; each prints a line when it ends", flush=True)
        for number, reason in side_by_side(runs, parallel, table) if runs else ():
            folder = Path(str(runs[number].run_dir))
            print(f"{folder.name}: {reason or result_line(folder)}", flush=True)
            failed += [f"{folder}: {reason}"] if reason else []
    return failed


def _tables(study: Study, runs: Sequence[Path]) -> list[str]:
    """Return what was tuned and the comparison of the runs, for a terminal and in Markdown."""
    from pflsim.analysis.comparison import compare_sets
    from pflsim.analysis.headings import edges_of
    from pflsim.analysis.runs import read_run
    from pflsim.analysis.tables import Table, drawn, render
    from pflsim.commands.tune_study import settings_text
    from pflsim.display.formats import in_text
    from pflsim.display.identity import identity

    edged = list[str]()
    rows, failures, found = list[tuple[str, ...]](), list[str](), [read_run(path) for path in runs]
    sign = 1 if not found or found[0].higher else -1  # the best value of a trial is the highest
    for method in study.methods:
        count, failed, best = len(study.trials(method)), study.failed(method), study.chosen(method)
        trials = f"{count}{f', {len(failed)} failed' * bool(failed)}{', all there are' * (count < study.budget)}"
        values, score = (settings_text(best.params), f"{sign * (best.value or 0.0):.4f}") if best else ("none", "")
        if edges := edges_of(best.params, method.space) if best else []:
            edged.append(f"{method.name}: {listed(edges)} at an edge of the space; better values can be beyond it")
        rows.append((identity(method.name).display, trials, settings_text(method.space), values, score))
        failures += [f"failed: {method.name} trial {number + 1}: {failed[number]}" for number in sorted(failed)]
    primary = in_text(found[0].primary if found else "accuracy")
    headers = ("method", "trials", "space", "chosen values", f"validation\n{primary}")
    told = f"validation {primary}: mean over clients, of the reported model in the trial's best round"
    notes = (told, *edged, *failures)
    table = Table(f"Tuning by validation, {study.budget} trials each", headers, tuple(rows), notes)
    compared = compare_sets(found) if found else []
    return [f"{drawn([table], kind)}\n\n{render(compared, kind)}".rstrip() for kind in ("text", "markdown")]


def check_first_runs(methods: Sequence[Method]) -> None:
    """Load the data and build the models of all methods, so that a mistake which only these show costs no trial."""
    prepare = partial(importlib.import_module("lightning_modules.prepare").prepare, kept={})
    of_all(lambda method: prepare(method.settings({})) and None, methods, [method.name for method in methods])


def side_by_side(runs: Iterable[Settings], parallel: int, table: SweepTable | None = None) -> Iterator[tuple[int, str]]:
    """Run or resume each run in a process of its own; yield the number of each that ends, and why it failed, or "".

    Args:
        runs: the next one is taken when a process is free.
        parallel: how many run at the same time.
        table: shows them by the names of their folders; None: nothing does.

    Raises:
        RunError: a process ended without a result; then no other is started. `Stopped` if there was a signal.
    """
    folders, crashed = list[str](), list[str]()

    def functions() -> Iterator[partial[str]]:
        for number, run in enumerate(runs):
            folders.append(str(run.run_dir))
            if table:
                table.names[number] = Path(folders[-1]).name
            yield partial(finish, run, table and table.path(number))
            if crashed:
                return

    for one in in_processes(functions(), parallel):
        if table:
            table.ended(one.number, failed=one.result != "")
        if one.result is not None:
            yield one.number, one.result
        else:
            crashed.append(f"{folders[one.number]}: {one.errors.strip()}")
    if crashed:
        raise RunError("\n".join([*crashed, "the same command continues the study"]))


def finish(settings: Settings, status: Path | None = None) -> str:
    """Run settings, or resume what an earlier session has left in their folder.

    Args:
        settings: of the run.
        status: see `run_alone`.

    Returns:
        Why the run failed, or "".
    """
    folder = Path(str(settings.run_dir))
    started = (folder / CONFIG).exists()
    if folder.exists():
        with run_lock(folder):  # a process of a killed study may still be saving: this is no failure of the trial
            if not started:  # killed before it had written its settings
                shutil.rmtree(folder)
    watching.set(partial(write_status, status) if status else None)
    try:
        if started:
            resume_run(str(folder), {"rounds": settings.rounds}, config_folders([]), own_process=True)
        else:
            run_alone(settings, status)
    except Stopped:
        raise
    except (SettingsError, RunError) as error:
        return str(error)
    return ""
