"""The command line `pflsim tune method=a,b …`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pflsim.config.checks import check
from pflsim.config.compose import composing, config_folders, quoted
from pflsim.config.installation import program
from pflsim.errors import RunError
from pflsim.terminal.exit_status import exit_status

if TYPE_CHECKING:
    from pflsim.commands.tune.study import Study

EXAMPLES = """examples:
  {program} tune method=local,fedavg,ditto rounds=50 --into tuned
  {program} tune method=fedavg,ditto 'search.lr=[0.01,0.1]' --trials 20 --seeds 5 --into tuned
  {program} tune method=fedprox,ditto 'search.ditto.lam={{low:0.1,high:10,log:true}}' --into tuned
  {program} tune method=fedavg,ditto rounds=40 --rounds 200 --into tuned    short trials, long runs
  {program} tune tuned                                     continue a study that was stopped

Every method gets the same number of trials, all with seed=N. The first has the values of the command line, and else the
method's defaults; Optuna suggests the others from the space of all methods (lr from 0.001 to 1, on a log scale) and
from the block `search:` in the method's file. The trial with the best mean validation accuracy of the model that the
method reports, in its best round, is chosen; test data play no part. Its settings then run with the seeds from N+1
on, for --rounds if that is given, and these runs are compared.

search.KEY=SPACE replaces or adds a space of all methods, search.METHOD.KEY=SPACE one of a setting of a method. SPACE is
a list of choices (of one: the setting is fixed), {{low:L,high:H}} or {{low:L,high:H,log:true}} (whole numbers if L and
H are), or null: no search.

Each run has a process of its own; sweep.parallel=N is how many work at the same time (default: one per CPU and 2 GiB of
free memory). With ray_address=auto, runs are tasks on a Ray cluster, and DIR must be on a file system that all nodes
share. Neither changes a result. The same command, or tune DIR, continues a study that was stopped.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0, 1 if a run of the chosen values is missing, 2 after an error in the settings, 128 + n if
        signal n stops it.
    """
    options = _options(arguments)
    return exit_status(lambda: _tune(options))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{program()} tune",
        description="Tune methods on validation data with equal budgets, then compare them with other seeds.",
        epilog=EXAMPLES.format(program=program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("settings", nargs="+", metavar="SETTING", help="method=a,b and other settings, or the folder of a study")
    add("--trials", type=_positive, metavar="N", help="trials of each method; default: 12")
    add("--seeds", type=_positive, metavar="N", help="runs of the chosen values, with the seeds after that; default: 3")
    add("--rounds", type=_positive, metavar="N", help="rounds of these runs; default: rounds=, those of the trials")
    add("--into", type=Path, metavar="DIR", help="folder of the study: its runs, tuned.json and tuned.md")
    add("--config-dir", action="append", default=[], metavar="DIR", help="look for groups in DIR too; may be repeated")
    options = parser.parse_intermixed_args(arguments)
    continued = len(options.settings) == 1 and "=" not in options.settings[0]
    if continued and (options.trials or options.seeds or options.rounds or options.into or options.config_dir):
        parser.error("tune DIR continues a study with its own settings; leave out the others")
    if not continued and options.into is None:
        parser.error("the following arguments are required: --into DIR")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number >= 1")
    return int(text)


def _tune(options: argparse.Namespace) -> None:
    from pflsim.commands.tune.suggest import check_installed

    check_installed()
    words, config_dirs = [quoted(text) for text in options.settings], options.config_dir
    folder, trials, seeds, rounds = options.into, options.trials or 12, options.seeds or 3, options.rounds
    if folder is None:
        from pflsim.commands.tune.study import read_study

        folder = Path(words[0])
        saved = read_study(folder)
        words, config_dirs = saved["command"]["words"], saved["command"]["config_dirs"]
        trials, seeds, rounds = saved["plan"]["trials"], len(saved["plan"]["seeds"]), saved["plan"].get("rounds")
    folders = config_folders(config_dirs)
    with composing(folders):
        from pflsim.commands.tune.methods import methods_of

        methods = tuple(methods_of(words, folders))
        first = methods[0].settings({})
        from pflsim.commands.tune.study import Study

        after = tuple(range(first.seed + 1, first.seed + 1 + seeds))
        study = Study(folder, tuple(words), tuple(config_dirs), methods, trials, first.seed, after, rounds)
        for method in methods if rounds else ():  # `methods_of` has checked the rounds of the trials
            check(method.settings(study.run_values))
        _run(study)


def _run(study: Study) -> None:
    """Run a study, and print and write its tables.

    Raises:
        SettingsError: a method cannot run with these settings.
        RunError: a method or a run is missing in the comparison.
    """
    from pflsim.analysis.compare.comparison import compare_sets
    from pflsim.analysis.compare.formats import drawn, render
    from pflsim.analysis.results import read_run
    from pflsim.commands.tune.processes import check_first_runs, run_side_by_side
    from pflsim.commands.tune.study import run_chosen, run_trials
    from pflsim.commands.tune.table import tuning_table
    from pflsim.engine.interrupts import Stopped
    from pflsim.run_folder.files import write_atomically
    from pflsim.run_folder.folder import run_lock

    run, on_cluster = run_side_by_side, study.methods[0].settings({}).ray_address
    if on_cluster:
        run = importlib.import_module("ray_actors.cluster.tasks").run_on_cluster
    study.folder.mkdir(parents=True, exist_ok=True)
    with run_lock(study.folder):
        trials = study.read()
        if trials:
            print(f"{study.folder} has {sum(trial.ended for trial in trials)} trials of an earlier session", flush=True)
        elif not on_cluster:  # whose nodes may have other files
            check_first_runs({method.name: method.settings({}) for method in study.methods})
        try:
            run_trials(study, trials, run)
            folders, failed = run_chosen(study, trials, run)
        except Stopped:
            print(f"continue with  {program()} tune {study.folder}", file=sys.stderr)
            raise
        table = tuning_table(study, trials)
        found = compare_sets(map(read_run, folders)) if folders else []
        parts = [f"{drawn([table], kind)}\n\n{render(found, kind)}".rstrip() for kind in ("text", "markdown")]
        write_atomically(study.folder / "tuned.md", f"{parts[1]}\n")
        print(f"\n{parts[0]}\n\nwritten: {study.folder / 'tuned.json'}, {study.folder / 'tuned.md'}", flush=True)
    if failed:
        raise RunError("\n".join(failed))
