"""Compares the runs of a sweep when it ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pflsim.engine.interrupts import Stopped
from pflsim.errors import SettingsError
from pflsim.run_folder.folder import is_complete

if TYPE_CHECKING:
    from pflsim.analysis.results import Group


@contextmanager
def compared() -> Iterator[list[Path]]:
    """Yield a list for run folders, and compare them at the end of the block or when the sweep is stopped."""
    folders: list[Path] = []
    try:
        yield folders
    except Stopped:
        print_comparisons(folders)
        raise
    print_comparisons(folders)


def print_comparisons(folders: Sequence[Path]) -> None:
    """Print a table for each set of complete runs that can be compared; nothing with fewer than two runs.

    An error is printed in one line and not raised, because the runs themselves succeeded.
    """
    complete = [folder for folder in folders if is_complete(folder)]
    if len(complete) < 2:
        return
    with suppress(OSError):  # standard output is closed
        try:
            more = "more formats and curves: python launch.py compare --help"
            print(f"\n{comparisons(complete)}\n\n{more}", flush=True)
        except (SettingsError, ValueError, KeyError, TypeError) as error:
            print(f"the runs could not be compared: {str(error).partition(chr(10))[0]}", file=sys.stderr, flush=True)


def comparisons(folders: Sequence[Path]) -> str:
    """Return the tables of these runs as text that standard output can show.

    Groups with the same examples and evaluation share a table. If no two groups do, as in a sweep over partitions with
    one method, all groups are in one table without paired differences.
    """
    from pflsim.analysis.compare.comparison import compare
    from pflsim.analysis.compare.formats import render
    from pflsim.analysis.results import check_comparable, group_runs, read_run

    groups = group_runs(read_run(folder) for folder in folders)
    sets = comparable_sets(groups)
    if all(len(members) == 1 for members in sets):
        return render(compare(groups, objections=check_comparable(groups), paired=False), "text", sys.stdout)
    texts = []
    for members in sets:
        again = group_runs(run for group in members for run in group.runs)  # labels show what differs within the set
        texts.append(render(compare(again, objections=check_comparable(again)), "text", sys.stdout))
    return "\n\n\n".join(texts)


def comparable_sets(groups: Sequence[Group]) -> list[list[Group]]:
    """Return sets of groups with the same examples and the same evaluation, in order of first appearance."""
    from pflsim.analysis.results.groups import check_evaluation

    sets: list[list[Group]] = []
    for group in groups:
        fitting = (members for members in sets if not check_evaluation([*members, group]))
        members = next(fitting, None)
        if members is None:
            sets.append([group])
        else:
            members.append(group)
    return sets
