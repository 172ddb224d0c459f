"""The command line `pflsim compare RUNS…`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pflsim.config.names import program
from pflsim.errors import SettingsError
from pflsim.progress import counted

Add = Callable[..., Any]
"""`argparse.ArgumentParser.add_argument`."""
EXAMPLES = """examples:
  {program} compare 'runs/20261122-*'                      all folders that match a pattern
  {program} compare runs --reference fedavg --target 0.9   all runs in a folder, differences to FedAvg
  {program} compare runs --out table.tex                   a table for a paper; also .md, .csv and .txt
  {program} compare runs --clients --out clients.tex       the same with a line per client

Runs that differ only in their seed form a group, which is one line of the table. Groups can be compared if they have
the same partition (hash) for each seed and the same evaluation settings; otherwise each set of comparable groups has
tables of its own. Other settings may differ (rounds, lr, model, ...); the labels show them.
"""


def options(add: Add) -> None:
    """Add the options of the command."""
    of_groups(add)
    rows = "a table of clients: their rows, and each method's result with its interval"
    add("--clients", action="store_true", help=rows)
    add("--format", choices=["text", "markdown", "latex", "csv"], help="default: the suffix of --out, else text")
    add("--out", type=Path, metavar="FILE", help="write to a file (.txt, .md, .tex, .csv) instead of standard output")


def of_groups(add: Add) -> None:
    """Add the runs and what is compared of them."""
    add("runs", nargs="+", metavar="RUNS", help="run folders, folders of runs, or patterns")
    new = "judge on a test set of eval.sets, or the clients that joined after the last round: new_received, new_trained"
    add("--set", metavar="SET", help=f"{new}, new_received_all, new_trained_N, new_recalibrated_N (eval.newcomer_rows)")
    at = "round that figures are taken from; default: best_val if all runs have validation data, else last"
    add("--at", choices=["best_val", "last", "best_test_oracle"], help=at)
    default = "local, else fedavg; of settings of one method, the best"
    add("--reference", metavar="LABEL", help=f"label or method to compare with; default: {default}")
    target_options(add)


def target_options(add: Add) -> None:
    """Add the mean to reach."""
    what = (
        "mean to reach, as a number or as a share of the reference's, e.g. 95%%; default: the best that all runs reach"
    )
    add("--target", metavar="MEAN", help=what)
    add("--target-on", choices=["test", "val"], default="test", help="examples whose mean reaches it; default: test")


def how(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `pflsim.analysis.comparison.compare`, checked before runs are read."""
    from pflsim.analysis.targets import parsed

    if options.target is not None:
        parsed(options.target)
    return {"choice": options.at, "target": options.target, "target_on": options.target_on}


def execute(options: argparse.Namespace) -> None:
    """Compare runs: accuracy over seeds, traffic, and paired differences between clients."""
    from pflsim.analysis.comparison import compare_sets
    from pflsim.analysis.runs import find_runs, judged, read_run
    from pflsim.analysis.tables import format_of, render

    kind = options.format or format_of(options.out)
    folders = counted("reading runs", find_runs(options.runs))
    runs = judged(map(read_run, folders), options.set)
    found = compare_sets(runs, options.reference, **how(options))
    if len(found) > 1:
        print(f"these runs have {len(found)} sets of examples or ways of evaluation: a table each", file=sys.stderr)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(render(found, kind, clients=options.clients) + "\n", encoding="utf-8")
        print(f"written to {options.out}")
    else:
        print(render(found, kind, Console(), options.clients), flush=True)


def print_comparisons(folders: Sequence[Path]) -> None:
    """Print a table for each set of complete runs of a sweep that can be compared; nothing with fewer than two runs.

    An error is printed in one line and not raised, because the runs themselves succeeded.
    """
    from pflsim.analysis.comparison import compare_sets
    from pflsim.analysis.runs import read_run
    from pflsim.analysis.tables import render
    from pflsim.records.folder import is_complete

    complete = [folder for folder in folders if is_complete(folder)]
    if len(complete) < 2:
        return
    try:
        found = compare_sets(map(read_run, counted("reading runs", complete)))
        print(f"\n{render(found, 'text', Console())}\n\nmore formats: {program()} compare --help", flush=True)
    except (SettingsError, ValueError, KeyError, TypeError) as error:
        print(f"the runs could not be compared: {str(error).partition(chr(10))[0]}", file=sys.stderr, flush=True)
