"""The forest plot as text: the difference of each method to the reference."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from pflsim.analysis.charts import limits_of
from pflsim.analysis.comparison import Comparison, Row
from pflsim.display.formats import flowed
from pflsim.display.identity import MARKS, NOT_CLEAR
from pflsim.display.metrics import points, rounded, scale_of


def as_text(comparison: Comparison, lines: Sequence[Row], width: int, page: str = "dark") -> Text:
    """Draw a forest plot with characters.

    An interval that excludes 0 does not touch the column of 0, however the ends are rounded.

    Args:
        comparison: it has differences.
        lines: its groups, best first.
        width: number of columns, which no line exceeds if there are at least 48.
        page: "dark" or "light", the terminal's background.
    """
    metric, (low, high) = comparison.primary, limits_of(comparison, lines)
    heads = ("points" if scale_of(metric)[2] else "diff.", "worst", "mean")
    figures = [(line.deltas[0], *(line.figures[name].mean for name in ("worst_decile", "mean"))) for line in lines]
    cells = [(points(d.mean, metric) if d else "", rounded(worst, 2), rounded(mean)) for d, worst, mean in figures]
    beside = [(row, d, *(row.figures[name].mean for name in ("worst_decile", "mean"))) for row, d in comparison.beside]
    others = [(points(d, metric), rounded(worst, 2), rounded(mean)) for _, d, worst, mean in beside]
    wide = [1 + max(map(len, column)) for column in zip(heads, *cells, *others, strict=True)]
    names = min(max(12, *(len(row.label) for row in (*lines, *comparison.baselines))), width // 3)
    columns, grey = max(width - names - 1 - sum(wide), 16), NOT_CLEAR[page]

    def column(x: float) -> int:
        return 1 + round((x - low) / (high - low) * (columns - 3))

    zero = min(max(column(0), 2), columns - 3)  # so that both sides have a column

    def shortened(label: str) -> str:
        return label if len(label) <= names else label[: names - 1] + "…"

    def numbers(texts: Sequence[str]) -> str:
        return "".join(text.rjust(size) for text, size in zip(texts, wide, strict=True))

    def plotted(line: Row) -> tuple[str, bool]:
        """Return the characters of a line's plot, and whether the line of 0 is its own."""
        found, d = [" "] * columns, line.deltas[0]
        found[zero] = "│"
        mean, (left, right) = (d.mean, d.over_seeds) if d else (0.0, (None, None))
        if mean is None:
            return "".join(found), False
        first, last = mean if left is None else left, mean if right is None else right
        start, end = min(max(column(first), 0), columns), max(min(column(last), columns - 1), -1)
        if left is not None and first > 0:
            start, end = max(start, zero + 1), max(end, zero + 1)
        elif left is not None and last < 0:
            start, end = min(start, zero - 1), min(end, zero - 1)
        for place in range(start, end + 1):
            found[place] = "┼" if place == zero else "─"
        found[0], found[-1] = "◂" if first < low else found[0], "▸" if last > high else found[-1]
        mark = {"on these clients only": "○", "not clear": "◦"}.get(d.level if d else "", MARKS[line.who.mark][0])
        beyond = 1 if mean < low else columns - 2 if mean > high else None  # beside the arrow
        found[min(max(column(mean), start), end) if beyond is None else beyond] = mark
        return "".join(found), found[zero] != "│"

    drawn = Text("\n").join([*_head(comparison, (low, high), zero, names + 1, columns, numbers(heads))])
    for line, texts in zip(lines, cells, strict=True):
        colour, d = getattr(line.who, page), line.deltas[0]
        text, own = plotted(line)
        drawn.append("\n" + shortened(line.label).ljust(names + 1), f"bold {colour}")
        at = len(drawn)
        drawn.append(text, grey if d and d.level == "not clear" else colour)
        if not own:
            drawn.stylize(grey, at + zero, at + zero + 1)
        drawn.append(numbers(texts))
    for (row, difference, *_), texts in zip(beside, others, strict=True):
        found, place = [" "] * columns, column(difference)
        found[zero] = "│"
        found[min(max(place, 0), columns - 1)] = "◂" if difference < low else "▸" if difference > high else "┊"
        drawn.append("\n" + shortened(row.label).ljust(names + 1), f"bold {getattr(row.who, page)}")
        drawn.append("".join(found) + numbers(texts), grey)
    key = ["─ 95% over seeds", "own mark: clear", "○ on these clients only", "◦ not clear"]
    if all(d is None or d.over_seeds[0] is None for d, *_ in figures):
        key = ["one seed: no interval over seeds, nothing is clear"]
    key += ["┊ regression, not tested"] * bool(others)
    key += ["◂▸ beyond the axis"] * any(arrow in drawn.plain for arrow in "◂▸")
    return drawn.append("\n".join(["\n", *flowed(key, width)]))


def _head(
    comparison: Comparison, limits: Sequence[float], zero: int, before: int, columns: int, heads: str
) -> Iterator[Text]:
    """Yield the line that says which side is better, and the numbers at the ends of the axis."""
    sides, reference = ("worse", "better") if comparison.higher else ("better", "worse"), comparison.reference.label
    room, left, right = before + zero, f"{sides[0]} than {reference} ", f" {sides[1]}"
    if len(left) > room:
        left, right = f"{sides[0]} ", f" {sides[1]} than {reference}"
    after = columns - zero - 1
    yield Text(left.rjust(room) + "│" + (right if len(right) <= after else "").ljust(after) + heads)
    low, high = (points(end, comparison.primary) for end in limits)
    space = columns - 2 - len(low) - len(high)
    at = zero - 1 - len(low)
    middle = "0".rjust(at + 1).ljust(space) if 0 < at < space - 1 else " " * space
    yield Text(" " * (before + 1) + low + middle + high)
