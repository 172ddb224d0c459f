"""The groups of a comparison in order, with what the forest plot shows of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from pflsim.analysis.comparison import Comparison, Row, best_first
from pflsim.analysis.differences import Difference
from pflsim.analysis.forest import REACH, axis_limits, least_length
from pflsim.analysis.report.axes import Axis, axis
from pflsim.analysis.report.grid import Grid
from pflsim.terminal.identity import Identity, identity


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A group in the page.

    Args:
        row: its figures.
        who: its colour and mark.
        deltas: its differences to the references; None: it is the reference, or there is no difference.
        leads: whether it cannot be told apart from the best of several groups.
    """

    row: Row
    who: Identity
    deltas: tuple[Difference | None, ...]
    leads: bool

    @property
    def label(self) -> str:
        """The name for readers."""
        return self.row.group.label


@dataclass(frozen=True)
class Benchmark:
    """A comparison as the page shows it.

    Args:
        comparison: what is shown in detail: of many settings, the best of each method.
        whole: the comparison of all groups.
        grid: the settings that were tried, of methods with several.
    """

    comparison: Comparison
    whole: Comparison
    grid: Grid | None

    @cached_property
    def lines(self) -> list[Line]:
        """The groups, best first; as given if they cannot be compared."""
        comparison = self.comparison
        rows, tied = comparison.rows, comparison.tied * (len(comparison.tied) > 1 and self.seeds > 1)
        found = [{d.group.label: d for d in each.differences} for each in comparison.families]
        return [
            Line(row, identity(row.group.method), tuple(each.get(row.group.label) for each in found), label in tied)
            for row in (rows if comparison.objections else best_first(rows))
            for label in [row.group.label]
        ]

    @property
    def seeds(self) -> int:
        """The largest number of seeds of a group."""
        return max(len(group.runs) for group in self.comparison.groups)

    @property
    def least(self) -> float:
        """The least length of an axis of the primary metric."""
        return least_length(self.comparison)

    def delta_axis(self, number: int = 0) -> Axis:
        """Return the axis of the differences to a reference."""
        found = [line.deltas[number] for line in self.lines]
        if number:  # a narrow column with all means
            means = [d.mean for d in found if d and d.mean is not None]
            most = REACH * max([self.least / 2, *map(abs, means)])
            ends = [min(max(end, -most), most) for d in found if d for end in d.over_seeds if end is not None]
            return axis([0.0, *means, *ends], self.least, 2)
        return _cut(found, self)


def _cut(found: Sequence[Difference | None], benchmark: Benchmark) -> Axis:
    """Return an axis with the limits of the forest plot; the differences are those of the best methods first."""
    shown = [(d.mean, d) for d in found if d and d.mean is not None]
    values, intervals = [(mean, *d.by_seed) for mean, d in shown], [d.over_seeds for _, d in shown]
    return axis(axis_limits(values, benchmark.comparison.higher, benchmark.least, intervals), pad=0)


def overall(benchmarks: Sequence[Benchmark]) -> tuple[list[list[Line | None]], Axis]:
    """Return the forest plot of several benchmarks.

    Returns:
        A line for each method and benchmark, None if it lacks the method, sorted by the mean over the benchmarks; and
        the axis of the differences to the references.
    """
    by_label = [{line.label: line for line in each.lines} for each in benchmarks]
    rows = [[own.get(label) for own in by_label] for label in dict.fromkeys(label for own in by_label for label in own)]

    def mean(row: list[Line | None]) -> float:
        return fmean(line.row.figures["mean"].mean for line in row if line)

    ordered = sorted(rows, key=mean, reverse=benchmarks[0].comparison.higher)
    return ordered, _cut([line.deltas[0] for row in ordered for line in row if line], benchmarks[0])
