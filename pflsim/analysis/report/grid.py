"""The grid of a report: many settings of the same methods, and the best setting of each method."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pflsim.analysis.comparison import Row, row, score
from pflsim.analysis.groups import Group
from pflsim.analysis.runs import NEWER
from pflsim.config.names import written
from pflsim.display.formats import Choice
from pflsim.display.identity import identity

MAX_GROUPS = 6
"""More groups than that, with several of a method, are shown as a grid."""
MAX_COLUMNS = 10
"""A setting with more values is a column of names, not a row of cells."""


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """A group in the grid.

    Args:
        row: its figures.
        score: mean of the primary metric on validation data in the chosen round, over seeds; on test data without
            validation data. Negative if lower is better.
        shade: the score on a scale from the worst (0) to the best (1) of its method and condition.
    """

    row: Row
    score: float
    shade: float


@dataclass(frozen=True, slots=True)
class Grid:
    """All groups as a table.

    Args:
        keys: the settings that name a line, besides the method.
        across: the setting whose values are the columns; None: there is one column.
        values: its values.
        lines: method, values of `keys`, and a cell for each column; None if there is no such group.
        cells: all groups, the best score first.
    """

    keys: tuple[str, ...]
    across: str | None
    values: tuple[str, ...]
    lines: list[tuple[str, tuple[str, ...], list[Cell | None]]]
    cells: list[Cell]

    @property
    def places(self) -> list[float] | None:
        """Places of `values` on an axis in percent, logarithmic over a decade or more; None: not all are numbers."""
        try:
            numbers = [float(value) for value in self.values]
        except ValueError:
            return None
        if 0 < 10 * min(numbers) <= max(numbers):
            numbers = [math.log(number) for number in numbers]
        low, high = min(numbers), max(numbers)
        return [100 * (number - low) / (high - low or 1.0) for number in numbers]

    @property
    def shown(self) -> list[Group]:
        """The best group of every method and condition, labelled with these, by method in order of appearance."""
        best = {_kind(cell.row.group): cell.row.group for cell in reversed(self.cells)}
        methods = list(dict.fromkeys(method for method, *_ in self.lines))
        kinds = sorted(best, key=lambda kind: methods.index(kind[0]))
        return [replace(best[method, *on], label=" ".join([identity(method).display, *on])) for method, *on in kinds]


def grid_of(groups: Sequence[Group], choice: Choice) -> Grid | None:
    """Return the grid; None if there is one group of each method and condition, or the groups are few and of several.

    A condition is what an experiment compares and nobody chooses by validation: attack, aggregator, uplink and privacy.
    """
    kinds = list(dict.fromkeys(map(_kind, groups)))
    if len(kinds) == len(groups) or 1 < len(kinds) <= len(groups) <= MAX_GROUPS:
        return None
    methods = list(dict.fromkeys(group.method for group in groups))
    keys = list(dict.fromkeys(key for group in groups for key in group.settings))
    values = {key: sorted({_value(group, key) for group in groups}, key=_order) for key in keys}
    across = max((k for k in keys if len(values[k]) <= MAX_COLUMNS), key=lambda k: len(values[k]), default=None)
    keys = [key for key in keys if key != across]
    columns = values[across] if across else [""]
    cells = [cell for kind in kinds for cell in _cells([g for g in groups if _kind(g) == kind], choice)]
    lines: dict[tuple[str, tuple[str, ...]], list[Cell | None]] = {}
    for cell in cells:
        group = cell.row.group
        name = group.method, tuple(_value(group, key) for key in keys)
        line = lines.setdefault(name, [None] * len(columns))
        line[columns.index(_value(group, across)) if across else 0] = cell
    order = sorted(lines, key=lambda name: (methods.index(name[0]), [_order(value) for value in name[1]]))
    ranked = sorted(cells, key=lambda cell: -cell.score)
    return Grid(tuple(keys), across, tuple(columns), [(*name, lines[name]) for name in order], ranked)


def _kind(group: Group) -> tuple[str, ...]:
    """Return the method and the condition of a group, as `KEY=VALUE`."""
    conditions = (key for key in group.settings if key.partition(".")[0] in NEWER)
    return group.method, *(f"{key}={written(group.settings[key])}" for key in conditions)


def _cells(groups: Sequence[Group], choice: Choice) -> list[Cell]:
    """Return the cells of the groups of one method and condition."""
    scores = [score(group, choice) for group in groups]
    low, high = min(scores), max(scores)
    shades = [(score - low) / (high - low) if high > low else 1.0 for score in scores]
    return [Cell(row(group, choice), *own) for group, *own in zip(groups, scores, shades, strict=True)]


def _value(group: Group, key: str) -> str:
    return written(group.settings[key]) if key in group.settings else ""


def _order(value: str) -> tuple[bool, float, str]:
    """Return a key that sorts numbers before words."""
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value
