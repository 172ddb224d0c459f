"""Compares the runs of a sweep when it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pflsim.analysis.compare.comparison import compare
from pflsim.analysis.compare.formats import render
from pflsim.analysis.results import Group, check_comparable, group_runs, read_run
from pflsim.analysis.results.groups import check_evaluation
from pflsim.config.installation import program
from pflsim.errors import SettingsError
from pflsim.run_folder.folder import is_complete


def print_comparisons(folders: Sequence[Path]) -> None:
    """Print a table for each set of complete runs that can be compared; nothing with fewer than two runs.

    An error is printed in one line and not raised, because the runs themselves succeeded.
    """
    complete = [folder for folder in folders if is_complete(folder)]
    if len(complete) < 2:
        return
    with suppress(OSError):  # standard output is closed
        try:
            more = f"more formats and curves: {program()} compare --help"
            print(f"\n{comparisons(complete)}\n\n{more}", flush=True)
        except (SettingsError, ValueError, KeyError, TypeError) as error:
            print(f"the runs could not be compared: {str(error).partition(chr(10))[0]}", file=sys.stderr, flush=True)


def comparisons(folders: Sequence[Path]) -> str:
    """Return the tables of these runs as text that standard output can show.

    Groups with the same examples and evaluation share a table. If no two groups do, as in a sweep over partitions with
    one method, all groups are in one table without paired differences.
    """
    groups = group_runs(read_run(folder) for folder in folders)
    sets = comparable_sets(groups)
    paired = any(len(members) > 1 for members in sets)
    texts = []
    for members in sets if paired else [groups]:
        # Group again: labels show what differs within the set.
        again = group_runs(run for group in members for run in (*group.runs, *group.left_out))
        texts.append(render(compare(again, objections=check_comparable(again), paired=paired), "text"))
    return "\n\n\n".join(texts)


def comparable_sets(groups: Sequence[Group]) -> list[list[Group]]:
    """Return sets of groups with the same examples and the same evaluation, in order of first appearance."""
    sets: list[list[Group]] = []
    for group in groups:
        fitting = [members for members in sets if not check_evaluation([*members, group])]
        if fitting:
            fitting[0].append(group)
        else:
            sets.append([group])
    return sets
