"""The forest plot: the difference of each method to the reference, as rows with an axis, and drawn as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from pflsim.analysis.comparison import Comparison, best_first
from pflsim.analysis.differences import Level
from pflsim.analysis.verdict import rounded, scale_of, signed
from pflsim.terminal.formats import flowed
from pflsim.terminal.identity import Identity, identity

CUT = 4
"""The axis leaves out methods that are worse by this multiple of what the better half of the methods needs."""
REACH = 2
"""The axis has the ends of intervals up to this multiple of the largest mean of the better half."""
LEAST = 0.04
"""Least length of the axis: of an accuracy in its own unit, of other metrics as a part of the reference's value."""
NOT_CLEAR = {"light": "#868d99", "dark": "#828a97"}
GLYPHS = {
    "circle": "●", "square": "■", "diamond": "◆", "up": "▲", "down": "▼", "left": "◄", "right": "►", "pentagon": "◉",
    "hexagon": "◈", "star": "★", "plus": "╬", "cross": "╳",
}  # fmt: skip
"""Marks as characters that take one cell of a terminal."""


@dataclass(frozen=True, slots=True)
class ForestRow:
    """A method.

    Args:
        name: the label of the group.
        identity: its colour and mark.
        mean: the difference to the reference, in the unit of the plot; 0 for the reference, None without pairs.
        by_seed: the difference of each seed.
        low, high: ends of the interval over seeds; None with one seed.
        level: the evidence; None for the reference.
        value, worst: mean and worst decile over clients of the metric, as mean over seeds.
    """

    name: str
    identity: Identity
    mean: float | None
    by_seed: tuple[float, ...]
    low: float | None
    high: float | None
    level: Level | None
    value: float
    worst: float


@dataclass(frozen=True, slots=True)
class Forest:
    """The differences of all methods to a reference, best method first.

    Args:
        rows: the methods with the reference.
        limits: of the axis; means outside are beyond it.
        reference: its name.
        metric: the name of the primary metric.
        higher: whether a higher value of it is better.
        unit: percentage points of an accuracy, else "".
    """

    rows: tuple[ForestRow, ...]
    limits: tuple[float, float]
    reference: str
    metric: str
    higher: bool
    unit: str

    def signed(self, value: float | None) -> str:
        """Return a difference as text, with one decimal for points."""
        return signed(value, 1 if self.unit else None)


def forest(comparison: Comparison) -> Forest | None:
    """Return the forest plot of a comparison; None if its groups cannot be compared."""
    by_label = {d.group.label: d for d in comparison.differences}
    if not by_label or comparison.objections:
        return None
    scale, _, unit = scale_of(comparison.primary)
    rows = []
    for row in best_first(comparison.rows):
        d, name, own = by_label.get(row.group.label), row.group.label, identity(row.group.method)
        value, worst = row.figures["mean"].mean, row.figures["worst_decile"].mean
        if d is None:
            rows.append(ForestRow(name, own, 0.0, (), None, None, None, value, worst))
        else:
            mean, low, high = (None if x is None else scale * x for x in (d.mean, *d.over_seeds))
            seeds = tuple(scale * x for x in d.by_seed)
            rows.append(ForestRow(name, own, mean, seeds, low, high, d.level, value, worst))
    shown = [(row.mean, row) for row in rows if row.level and row.mean is not None]
    values, intervals = [(mean, *row.by_seed) for mean, row in shown], [(row.low, row.high) for _, row in shown]
    limits = axis_limits(values, comparison.higher, scale * least_length(comparison), intervals)
    reference = comparison.reference.label
    return Forest(tuple(rows), limits, reference, comparison.primary, comparison.higher, unit.strip())


def least_length(comparison: Comparison) -> float:
    """Return the least length of an axis of the primary metric (`LEAST`)."""
    own = [row for row in best_first(comparison.rows) if row.group is comparison.reference]
    base = 1.0 if scale_of(comparison.primary)[2] or not own else abs(own[0].figures["mean"].mean)
    return LEAST * (base or 1.0)


def axis_limits(
    values: Sequence[Sequence[float]],
    higher: bool,
    least: float,
    intervals: Sequence[tuple[float | None, float | None]] = (),
) -> tuple[float, float]:
    """Return the limits of the axis.

    It has 0, the means and seeds of the methods that are not far behind (`CUT`), and the intervals of the better half
    as far as `REACH`.

    Args:
        values: the mean and the seeds of each method, best first.
        higher: whether a higher difference is better.
        least: the least length.
        intervals: of each method, if there are any.
    """
    sign = 1 if higher else -1
    reach = [[sign * x for x in own] for own in values]
    better = (len(reach) + 1) // 2
    need = max([least / 2, *(abs(x) for own in reach[:better] for x in own)])
    near = [own[0] >= -CUT * need for own in reach]
    shown = [0.0, *(x for own, holds in zip(reach, near, strict=True) if holds for x in own)]
    ends = [sign * x for pair in intervals[:better] for x in pair if x is not None]
    most = REACH * max([least / 2, *(abs(own[0]) for own in reach[:better])])
    shown += [min(max(x, -most), most) for x in ends]
    low, high = min(shown), max(shown)
    more = max(0.05 * (high - low), (least - (high - low)) / 2)
    return (low - more, high + more) if higher else (-high - more, more - low)


def as_text(plot: Forest, width: int, page: str = "dark") -> Text:
    """Draw a forest plot with characters.

    An interval that excludes 0 does not touch the column of 0, however the ends are rounded.

    Args:
        plot: what to draw.
        width: number of columns, which no line exceeds if there are at least 48.
        page: "dark" or "light", the terminal's background.
    """
    heads = ("points" if plot.unit else "diff.", "worst", "mean")
    cells = [
        (plot.signed(row.mean) if row.level else "", rounded(row.worst, 2), rounded(row.value)) for row in plot.rows
    ]
    wide = [1 + max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    names = min(max(12, *(len(row.name) for row in plot.rows)), width // 3)
    columns = max(width - names - 1 - sum(wide), 16)
    (low, high), grey = plot.limits, NOT_CLEAR[page]

    def column(x: float) -> int:
        return 1 + round((x - low) / (high - low) * (columns - 3))

    zero = min(max(column(0), 2), columns - 3)  # so that both sides have a column

    def numbers(texts: Sequence[str]) -> str:
        return "".join(text.rjust(size) for text, size in zip(texts, wide, strict=True))

    def plotted(row: ForestRow) -> tuple[str, bool]:
        """Return the characters of a row's plot, and whether the line of 0 is its own."""
        found, mean, (first, last) = [" "] * columns, row.mean, (row.low, row.high)
        found[zero] = "│"
        if mean is None:
            return "".join(found), False
        first, last = mean if first is None else first, mean if last is None else last
        start, end = min(max(column(first), 0), columns), max(min(column(last), columns - 1), -1)
        if row.low is not None and first > 0:
            start, end = max(start, zero + 1), max(end, zero + 1)
        elif row.low is not None and last < 0:
            start, end = min(start, zero - 1), min(end, zero - 1)
        for place in range(start, end + 1):
            found[place] = "┼" if place == zero else "─"
        found[0], found[-1] = "◂" if first < low else found[0], "▸" if last > high else found[-1]
        mark = {"on these clients only": "○", "not clear": "◦"}.get(row.level or "", GLYPHS[row.identity.mark])
        beyond = 1 if mean < low else columns - 2 if mean > high else None  # beside the arrow
        found[min(max(column(mean), start), end) if beyond is None else beyond] = mark
        return "".join(found), found[zero] != "│"

    drawn = Text("\n").join([*_head(plot, zero, names + 1, columns, numbers(heads))])
    for row, texts in zip(plot.rows, cells, strict=True):
        colour = getattr(row.identity, page)
        name = row.name if len(row.name) <= names else row.name[: names - 1] + "…"
        text, own = plotted(row)
        drawn.append("\n" + name.ljust(names + 1), f"bold {colour}")
        at = len(drawn)
        drawn.append(text, grey if row.level == "not clear" else colour)
        if not own:
            drawn.stylize(grey, at + zero, at + zero + 1)
        drawn.append(numbers(texts))
    key = ["─ 95% over seeds", "own mark: clear", "○ on these clients only", "◦ not clear"]
    if all(row.low is None for row in plot.rows):
        key = ["one seed: no interval over seeds, nothing is clear"]
    key += ["◂▸ beyond the axis"] * any(arrow in drawn.plain for arrow in "◂▸")
    return drawn.append("\n".join(["\n", *flowed(key, width)]))


def _head(plot: Forest, zero: int, before: int, columns: int, heads: str) -> Iterator[Text]:
    """Yield the line that says which side is better, and the numbers at the ends of the axis."""
    sides = ("worse", "better") if plot.higher else ("better", "worse")
    room, left, right = before + zero, f"{sides[0]} than {plot.reference} ", f" {sides[1]}"
    if len(left) > room:
        left, right = f"{sides[0]} ", f" {sides[1]} than {plot.reference}"
    after = columns - zero - 1
    yield Text(left.rjust(room) + "│" + (right if len(right) <= after else "").ljust(after) + heads)
    low, high = map(plot.signed, plot.limits)
    space = columns - 2 - len(low) - len(high)
    at = zero - 1 - len(low)
    middle = "0".rjust(at + 1).ljust(space) if 0 < at < space - 1 else " " * space
    yield Text(" " * (before + 1) + low + middle + high)
