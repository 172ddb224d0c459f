"""A comparison: rows, differences, and what they are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pflsim.analysis.compare.paired import Difference, differences, find_reference
from pflsim.analysis.compare.rows import Row, check_choice, common_choice, common_target, row
from pflsim.analysis.results import Group
from pflsim.run_folder.summary import Choice


@dataclass(frozen=True, slots=True)
class Comparison:
    """Groups side by side.

    Args:
        rows: one for each group.
        choice: which round figures are taken from.
        target: the accuracy to reach; None where no run is evaluated.
        target_given: whether somebody asked for it.
        reference: what differences are held against.
        differences: of all other groups.
        objections: why the groups should not be compared, which was done all the same.
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


def compare(
    groups: Sequence[Group],
    *,
    choice: Choice | None = None,
    target: float | None = None,
    reference: str | None = None,
    objections: Sequence[str] = (),
    paired: bool = True,
) -> Comparison:
    """Work everything out.

    Args:
        groups: at least one.
        choice: the round that figures are taken from; None: by validation where all runs have it, else the last.
        target: an accuracy to reach; None: the highest that every run reaches, rounded down to a hundredth.
        reference: label or method that the others are held against; None: Local, or else the first.
        objections: why they should not be compared, to be said beside the figures.
        paired: whether to hold the groups against each other client by client.

    Raises:
        SettingsError: a run has no such round, or there is no such reference.
    """
    against = find_reference(groups, reference)
    chosen = choice or common_choice(groups)
    check_choice(groups, chosen)
    aim = common_target(groups) if target is None else target
    rows = tuple(row(group, chosen, aim) for group in groups)
    found = differences(groups, against, chosen) if paired else ()
    return Comparison(rows, chosen, aim, target is not None, against, tuple(found), tuple(objections))
