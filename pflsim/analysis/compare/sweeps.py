"""The end of a sweep: its runs side by side."""

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
    """Gives a list for run folders; at the end of the block those in it are printed side by side.

    Also where the sweep was told to stop, for what was done until then.
    """
    folders: list[Path] = []
    try:
        yield folders
    except Stopped:
        print_comparisons(folders)
        raise
    print_comparisons(folders)


def print_comparisons(folders: Sequence[Path]) -> None:
    """Print complete runs side by side, where there are two or more: a table for each set that can be compared.

    The runs are over and have their records, so nothing that goes wrong here is an error of theirs: it is one line.
    """
    complete = [folder for folder in folders if is_complete(folder)]
    if len(complete) < 2:
        return
    with suppress(OSError):  # nobody reads it any more
        try:
            print(
                f"\n{comparisons(complete)}\n\nmore formats and curves: python launch.py compare --help",
                flush=True,
            )
        except (SettingsError, ValueError, KeyError, TypeError) as error:
            print(f"the runs could not be compared: {str(error).partition(chr(10))[0]}", file=sys.stderr, flush=True)


def comparisons(folders: Sequence[Path]) -> str:
    """The tables of these runs, as text that standard output can show.

    Groups with the same examples and evaluation make a table. Where no two have, as in a sweep over partitions with one
    method, all are in one table, without differences client by client.
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
        again = group_runs(run for group in members for run in group.runs)  # their labels have what differs among them
        texts.append(render(compare(again, objections=check_comparable(again)), "text", sys.stdout))
    return "\n\n\n".join(texts)


def comparable_sets(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups with the same examples and the same evaluation together, in order of first appearance."""
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
