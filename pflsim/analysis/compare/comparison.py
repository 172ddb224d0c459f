"""A comparison of groups: their figures and the differences between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pflsim.analysis.compare.paired import Difference, differences, find_reference
from pflsim.analysis.compare.rows import Row, check_choice, common_choice, common_target, row
from pflsim.analysis.results import Group, Run
from pflsim.run_folder.summary import Choice


@dataclass(frozen=True, slots=True)
class Comparison:
    """Groups side by side.

    Args:
        rows: one for each group.
        choice: the round that figures are taken from.
        target: the accuracy to reach; None if no run is evaluated.
        target_given: whether the caller set the target.
        reference: the group that the others are compared with.
        differences: one for each other group.
        objections: reasons why the groups should not be compared.
    """

    rows: tuple[Row, ...]
    choice: Choice
    target: float | None
    target_given: bool
    reference: Group
    differences: tuple[Difference, ...]
    objections: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the rows."""
        return tuple(row.group for row in self.rows)

    @property
    def runs(self) -> list[Run]:
        """The runs of all groups."""
        return [run for group in self.groups for run in group.runs]


def compare(
    groups: Sequence[Group],
    *,
    choice: Choice | None = None,
    target: float | None = None,
    reference: str | None = None,
    objections: Sequence[str] = (),
    paired: bool = True,
) -> Comparison:
    """Compare groups.

    Args:
        groups: at least one.
        choice: the round that figures are taken from; None: `best_val` if all runs have validation data, else `last`.
        target: an accuracy to reach; None: the highest that every run reaches, rounded down to 0.01.
        reference: label or method of the group to compare with; None: Local if present, else the first group.
        objections: reasons why the groups should not be compared, to be printed with the figures.
        paired: whether to compute differences client by client.

    Raises:
        SettingsError: a run has no such round, or the reference does not exist.
    """
    base = find_reference(groups, reference)
    chosen = choice or common_choice(groups)
    check_choice(groups, chosen)
    goal = common_target(groups) if target is None else target
    rows = tuple(row(group, chosen, goal) for group in groups)
    found = differences(groups, base, chosen) if paired else ()
    return Comparison(rows, chosen, goal, target is not None, base, tuple(found), tuple(objections))
