"""The comparisons of a page, and what its charts need besides `pflsim.analysis.charts`. The templates draw them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np
import pandas as pd

from pflsim.analysis.charts import Axis, axis, client_table, curve, limits_of, log_axis
from pflsim.analysis.comparison import Comparison, Row, frontier
from pflsim.analysis.differences import values_of
from pflsim.analysis.report.grid import Grid
from pflsim.config.names import listed
from pflsim.records.evaluation import grouped

MAX_COLUMNS = 60
"""With more clients, a column is the mean of neighbours in the order, and the data are drawn as histograms."""
MAX_POINTS = 60
"""Longer curves are thinned out to this number of points."""
NARROW = 2.0
"""How much more of a chart's width a letter takes on a phone."""
Label = tuple[float, float, str]


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

    @property
    def leaders(self) -> tuple[str, ...]:
        """The labels that cannot be told apart from the best of several groups."""
        return self.comparison.tied if len(self.comparison.tied) > 1 < self.comparison.seeds else ()

    def delta_axis(self, number: int = 0) -> Axis:
        """Return the axis of the differences to a reference."""
        return axis(limits_of(self.comparison, self.comparison.lines, number), count=2 if number else 4, pad=0)


def overall(benchmarks: Sequence[Benchmark]) -> tuple[list[list[Row | None]], Axis]:
    """Return the forest plot of several benchmarks.

    Returns:
        A line for each method and benchmark, None if it lacks the method, sorted by the mean over the benchmarks; and
        the axis of the differences to the references.
    """
    by_label = [{line.label: line for line in each.comparison.lines} for each in benchmarks]
    rows = [[own.get(label) for own in by_label] for label in dict.fromkeys(label for own in by_label for label in own)]

    def mean(row: list[Row | None]) -> float:
        return fmean(line.figures["mean"].mean for line in row if line)

    first = benchmarks[0].comparison
    ordered = sorted(rows, key=mean, reverse=first.higher)
    return ordered, axis(limits_of(first, [line for row in ordered for line in row if line]), pad=0)


@dataclass(frozen=True)
class Gains:
    """The primary metric of every client with every method.

    Args:
        y: the axis.
        table: [pairs, groups] by seed and client, in the order of the reference, the weakest first. Clients that are
            the same in every seed have their mean over the seeds.
        columns: the same; means of neighbours if there are many.
        tests: number of test examples by seed and client.
        by_seed: whether a row is a client of one of several seeds.
    """

    y: Axis
    table: pd.DataFrame
    columns: pd.DataFrame
    tests: pd.Series
    by_seed: bool

    def losers(self, label: str, reference: str, higher: bool) -> list[tuple[int, int]]:
        """Return the seed and the number of each client that a group makes worse than the reference."""
        gaps = (self.table[label] - self.table[reference]).to_numpy() * (1 if higher else -1)
        return sorted(self.table.index[gaps < -1e-9])


def gains(benchmark: Benchmark) -> Gains | None:
    """Return the values of the clients that all groups have; None if there is no such client."""
    comparison, same = benchmark.comparison, benchmark.comparison.families[0].same_clients
    if (table := client_table(comparison).dropna()).empty:
        return None
    (values,) = values_of([comparison.reference], comparison.choice).values()
    tests = pd.concat({seed: pd.Series(found["total"]) for seed, found in values.items()})
    if same:
        tests = pd.concat([pd.Series(tests.groupby(level=1).mean())], keys=[0])
    parts = np.array_split(np.arange(len(table)), min(len(table), MAX_COLUMNS))
    columns = pd.DataFrame([table.iloc[part].mean() for part in parts])
    y = axis(columns.to_numpy().ravel().tolist(), benchmark.comparison.least, 3)
    return Gains(y, table, columns, tests, comparison.seeds > 1 and not same)


@dataclass(frozen=True)
class Curves:
    """A measure over the rounds of every group: mean over the seeds, with a band from the lowest to the highest.

    Args:
        x, y: the axes.
        points: rounds, means, lows and highs by label.
        goal: the target that the caller has set, as a mean over the seeds; None: there is none.
        hits: the rounds in which the seeds of a group reach it, by label.
    """

    x: Axis
    y: Axis
    points: dict[str, list[list[float]]]
    goal: float | None
    hits: dict[str, list[int]]


def curves(benchmark: Benchmark) -> Curves:
    """Return the curves of the primary metric at the rounds that all runs of a group have."""
    each = {group.label: curve(group, most=MAX_POINTS) for group in benchmark.comparison.groups}
    points = {label: [values.tolist() for values in own] for label, own in each.items() if own}
    every = [round(number) for rounds, *_ in points.values() for number in rounds] or [1]
    values = [value for _, _, low, high in points.values() for value in (*low, *high)]
    x, target = Axis(min(every), max(*every, min(every) + 1), ()), benchmark.comparison.target
    goal = fmean(target.goals.values()) if target and target.given and target.goals else None
    values += [] if goal is None else [goal]
    hits = {row.label: [hit for hit in row.hits if hit is not None] for row in benchmark.comparison.rows}
    return Curves(x, axis(values, benchmark.comparison.least, 3), points, goal, {} if goal is None else hits)


@dataclass(frozen=True)
class Cost:
    """The primary metric against the bytes of the whole run.

    Args:
        x: the axis of bytes; None: no group sends any.
        y: the axis of the metric.
        height: of the chart in pixels.
        points: group, place in percent and pixels, place and anchor of its label on a screen and on a phone if there
            is room for one, and the label: the names of all groups whose marks cover each other, "" except for the
            first of them.
        front: the groups that are the best for their bytes, in ascending order of bytes.
    """

    x: Axis | None
    y: Axis
    height: int
    points: list[tuple[Row, float, float, tuple[Label | None, Label | None], str]]
    front: list[Row]

    def at(self, count: float) -> float:
        """Return the place of bytes in percent; none have a place of their own at the left."""
        return _place(self.x, count)


def cost(benchmark: Benchmark) -> Cost:
    """Return the costs and results of all groups."""
    sent = {line: line.figures["bytes_total"].mean for line in benchmark.comparison.lines}
    means = {line: line.figures["mean"].mean for line in benchmark.comparison.lines}
    x = log_axis(filter(None, sent.values())) if any(sent.values()) else None
    y = axis(means.values(), 2.5 * benchmark.comparison.least, 5, pad=0.08)
    front = frontier(benchmark.comparison)
    height = min(160 + 12 * len(sent), 320)
    where = {line: (_place(x, sent[line]), y.up(means[line], height)) for line in sent}
    ends = [*(where[line][0] for line in front[1:]), 100.0]
    taken = [(where[line][0], end, where[line][1]) for line, end in zip(front, ends, strict=True)]
    taken.append((0.0, 100.0, height))  # the axis of bytes
    for one, other in pairwise(front):  # the steps of the line
        at = where[other][0]
        taken += [(at, at, level) for level in np.linspace(where[one][1], where[other][1], 20)]
    wide, narrow = ([*taken, *((at - r, at + r, level) for at, level in where.values())] for r in (0.6, 0.6 * NARROW))
    first = dict.fromkeys([*front, *sorted(sent, key=lambda line: line.who.family != "reference")])
    points = []
    for alike in grouped((_near(where, line), line) for line in first).values():
        names, place = listed([line.label for line in alike]), (*where[alike[0]], alike[0] in front)
        labels = _free(names, *place, wide), _free(names, *place, narrow, NARROW)
        points += [(line, *where[line], labels, names * (line is alike[0])) for line in alike]
    return Cost(x, y, height, points[::-1], front)


def _near(where: dict[Row, tuple[float, float]], line: Row) -> Row:
    """Return the first group whose mark covers that of a group."""
    x, y = where[line]
    return next(each for each, (at, level) in where.items() if abs(at - x) < 1 and abs(level - y) < 8)


def _place(x: Axis | None, count: float) -> float:
    return round(16 + 0.84 * x.at(count), 2) if x and count else 9.0


def _free(
    label: str, x: float, y: float, front: bool, taken: list[tuple[float, float, float]], scale: float = 1.0
) -> Label | None:
    """Return place and anchor of a label that hits no mark and no other label; None if there is none.

    A letter takes 0.72 percent of the chart's width, times `scale`.
    """
    width = 0.72 * scale * len(label)
    centre = "start" if x < 12 else "middle"  # not into the numbers of the axis
    sides = (
        (x + 0.9 * scale, y + 4, "start"),
        (x - 0.9 * scale, y + 4, "end"),
        (x, y - 10, centre),
        (x, y + 19, centre),
    )
    for at, level, anchor in sides[2:] * front + sides:
        begin = at - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        clear = all(begin > end or begin + width < start or abs(level - 4 - y) > 11 for start, end, y in taken)
        if clear and begin > 0 and begin + width < 100:
            taken.append((begin, begin + width, level - 4))
            return round(at, 2), level, anchor
    return None
