"""The figures for papers: forest plot, curves, clients, and cost, each with a table of its numbers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pflsim.analysis.calibration import calibrations, second_class, shown
from pflsim.analysis.charts import Against, client_table, curve, curve_points, limits_of, log_axis
from pflsim.analysis.comparison import Comparison, Row, best_first, frontier
from pflsim.analysis.differences import Difference, Level
from pflsim.analysis.tables import Table, title
from pflsim.config.names import listed
from pflsim.display.formats import CHOSEN, format_bytes, in_text
from pflsim.display.identity import DASHES, MARKS, NOT_CLEAR, Identity
from pflsim.display.metrics import points, rounded, scale_of
from pflsim.records.evaluation import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, CONTEXT, GRID, GREY = "#16181d", "#8c939f", "#ebedf0", NOT_CLEAR["light"]
HEIGHT = 2.8
"""Greatest height of a single panel in inches."""
ONE_AXIS = 6
"""More curves have a panel each."""
POINTS = ", in percentage points"
Drawn = tuple["Figure", Table]


class Style(NamedTuple):
    """A template: widths of a column and of the page's text in inches, sizes of labels and of ticks in points, font.

    STIX, which matplotlib carries, resembles the templates' Times.
    """

    column: float
    page: float
    labels: float
    ticks: float
    font: str = "STIXGeneral"


STYLES = {
    "icml": Style(3.25, 6.75, 8, 7),
    "neurips": Style(5.5, 5.5, 8, 7),
    "ieee": Style(3.5, 7.16, 8, 7),
    "thesis": Style(5.9, 5.9, 9, 8),
}


@contextmanager
def template(style: Style) -> Iterator[None]:
    """Give matplotlib the fonts and sizes of a template, whatever the calling program has set."""
    from matplotlib import style as styles

    texts = {"axes.titlesize": style.labels, "xtick.labelsize": style.ticks, "ytick.labelsize": style.ticks}
    lines = {"axes.linewidth": 0.6, "xtick.major.width": 0.6, "xtick.major.size": 2.5, "ytick.major.size": 0}
    colours = dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), "#5b626e") | {"ytick.labelcolor": "black"}
    fonts = {"font.family": style.font, "font.size": style.labels, "pdf.fonttype": 42}  # 42: TrueType, not Type 3
    spines = {"axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False}
    with styles.context(["default", {**texts, **lines, **colours, **fonts, **spines}]):
        yield


def new_figure(style: Style, width: float, height: float) -> Figure:
    """Return a figure of a size in inches that is saved with the settings of the template, too."""
    from matplotlib.figure import Figure

    class Paper(Figure):
        def savefig(self, *args: Any, **kwargs: Any) -> None:
            with template(style):
                super().savefig(*args, **kwargs)

    return Paper(figsize=(width, height), layout="constrained")


def draw_forest(comparison: Comparison, style: Style) -> Drawn:
    """Draw the differences to the reference: the interval over seeds, a tick per seed, and the mean by its evidence."""
    lines, metric, reference = comparison.lines, comparison.primary, comparison.reference.label
    height = 4.5 + 1.6 * (len(lines) + len(comparison.beside))
    figure = new_figure(style, style.column, height * style.labels / 72)
    axes, (low, high) = figure.add_subplot(), limits_of(comparison, lines)
    beside = {"va": "center_baseline", "transform": axes.get_yaxis_transform()}
    table = []
    for y, line in enumerate(lines):
        value, worst = (rounded(line.figures[name].mean) for name in ("mean", "worst_decile"))
        axes.text(1.02, y, value, **beside)
        if line.who.family == "reference":
            axes.axhspan(y - 0.48, y + 0.48, color=GRID, linewidth=0, zorder=0)
        if d := line.deltas[0]:
            ends = [points(x, metric) for x in (d.mean, *d.over_seeds)]
            _interval(axes, line.who, d, y, metric, (low, high))
        else:
            ends = [""] * 3
            axes.plot(0, y, **mark_of(line.who, None, 4.5))
        table.append((line.label, value, worst, *ends, d.level if d else "reference"))
    axes.text(1.02, -0.9, in_text(metric), color=CONTEXT, **beside)
    for row, difference in comparison.beside:
        table.append((row.label, *(rounded(row.figures[name].mean) for name in ("mean", "worst_decile")),
                      points(difference, metric), "", "", "not tested"))  # fmt: skip
        if low <= difference <= high:
            axes.axvline(difference, color=row.who.light, linewidth=1, linestyle=":", zorder=1, label=row.label)
    if comparison.beside:
        figure.legend(loc="outside upper center", frameon=False)
    axes.axvline(0, color=CONTEXT, linewidth=0.8, zorder=1)
    axes.set(xlim=(low, high), ylim=(len(lines) - 0.4, -0.6), axisbelow=True)
    axes.set_yticks(range(len(lines)), [line.label for line in lines])
    axes.grid(axis="x", color=GRID)
    scale, _, unit = scale_of(metric)
    axes.xaxis.set_major_formatter(lambda x, _: signed_tick(scale * x))
    axes.set_xlabel(f"difference to {reference}" + ", percentage points" * bool(unit))
    headers = ("method", in_text(metric), "worst decile", "difference", "from", "to", "evidence")
    marks = "Filled marks: clear; hollow: clear on these clients, not over seeds; grey dots: not clear; ticks: seeds"
    meaning = "Lines, and from, to: 95% interval over seeds; arrows: beyond the axis"
    notes = (f"Difference to {reference}{POINTS * bool(unit)}", meaning, marks, _round(comparison))
    return figure, Table(title(comparison, in_words=True), headers, tuple(table), notes)


def _interval(axes: Axes, who: Identity, d: Difference, y: int, metric: str, limits: tuple[float, float]) -> None:
    """Draw a difference: what lies beyond the limits as an arrow, and the mean there as a number."""
    mean, (low, high), (first, last) = d.mean, limits, d.over_seeds
    if mean is None:
        return
    colour = GREY if d.level == "not clear" else who.light
    first, last = mean if first is None else first, mean if last is None else last
    inside = low <= mean <= high
    face = "white" if d.level == "on these clients only" and not inside else colour
    ends = (first, last) if inside else (mean, mean)
    for beyond, edge, arrow in ((ends[0] < low, low, 4), (ends[1] > high, high, 5)):
        if beyond:
            axes.plot(edge, y, marker=arrow, color=colour, markerfacecolor=face, markersize=3)  # the tip is there
    if inside:
        line = {"color": colour, "linewidth": 1.3, "alpha": 0.7, "solid_capstyle": "butt"}  # a cap may cross 0
        axes.plot(np.clip([first, last], low, high), [y, y], **line)
        seeds = [x for x in d.by_seed if low <= x <= high]
        axes.plot(seeds, [y] * len(seeds), "|", color=colour, markersize=4.5, markeredgewidth=0.8)
        axes.plot(mean, y, **mark_of(who, d.level, 4.5))
    else:
        edge, move, side = (low, 5, "left") if mean < low else (high, -5, "right")
        _text(axes, points(mean, metric), (edge, y), (move, 0), side)


def signed_tick(value: float, _: float | None = None) -> str:
    """Format a tick of a difference with its sign and a true minus."""
    return f"{value:+.4g}".replace("-", "−") if value else "0"


def mark_of(who: Identity, level: Level | None, size: float) -> dict[str, Any]:
    """Return how a mean is drawn: filled if it is clear, hollow if on these clients only, a grey dot if not clear."""
    if level == "not clear":
        return {"marker": "o", "color": GREY, "markersize": 0.65 * size, "linestyle": "", "zorder": 3}
    colour = who.light
    face = "white" if level == "on these clients only" else colour
    looks = {"markerfacecolor": face, "markeredgecolor": colour, "markersize": size, "zorder": 3}
    return {"marker": MARKS[who.mark][1], "linestyle": "", **looks}


def _text(axes: Axes, text: str, at: Any, move: tuple[float, float], side: Any, **looks: Any) -> None:
    """Write text beside a point, moved by some points of the font's unit."""
    axes.annotate(text, at, move, textcoords="offset points", ha=side, va="center", **looks)


def _panels(style: Style, rows: Sequence[Row], x_label: str, y_label: str) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each row, over the page's width if there are more than nine."""
    width = style.page if len(rows) > 9 else style.column
    down = math.ceil(len(rows) / max(int(width / 1.05), 1))
    along = math.ceil(len(rows) / down)
    figure = new_figure(style, width, 0.45 + 1.0 * down)
    found = [*figure.subplots(down, along, sharex=True, sharey=True, squeeze=False).flat]
    for number, (axes, row) in enumerate(zip(found, rows, strict=False)):
        axes.set_title(row.label, loc="left")
        axes.tick_params(labelbottom=number + along >= len(rows), bottom=number + along >= len(rows))
        axes.grid(axis="y", color=GRID)
        axes.set_axisbelow(True)
    for axes in found[len(rows) :]:
        axes.set_axis_off()
    figure.supxlabel(x_label, fontsize=style.labels)
    figure.supylabel(y_label, fontsize=style.labels)
    return figure, found[: len(rows)]


def draw_curves(comparison: Comparison, style: Style, against: Against = "rounds") -> Drawn:
    """Draw the primary metric by round, bytes or seconds: its mean over seeds, and a band from lowest to highest.

    Bytes and seconds are means over seeds too. The table is by round.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    each = [(row, curve(row.group), curve(row.group, against)) for row in best_first(comparison.rows)]
    found = {row: (by_round, own) for row, by_round, own in each if by_round and own}
    name = {"rounds": "round", "bytes": "bytes in both directions, all clients", "seconds": "seconds"}[against]
    methods = [row.group.method for row in found]
    behind = [row for row, m in zip(found, methods, strict=True) if m in ("local", "fedavg") and methods.count(m) == 1]

    def draw(axes: Axes, row: Row, line: str = "-", colour: str | None = None) -> None:
        own, shade = found[row][1], colour or row.who.light
        axes.plot(own.x, own.mean, line, color=shade, linewidth=0.8 if colour else 1.1)
        if colour is None:
            axes.fill_between(own.x, own.low, own.high, color=shade, alpha=0.2, linewidth=0)

    if len(found) <= ONE_AXIS:
        figure = new_figure(style, style.column, min(style.column * 0.7, HEIGHT))
        axes = figure.add_subplot(xlabel=name, ylabel=f"test {in_text(comparison.primary)}", axisbelow=True)
        for row in found:
            draw(axes, row, DASHES[row.who.dash])
        axes.grid(axis="y", color=GRID)
        _mark_target(axes, comparison, [*found], against)
        figure.draw_without_rendering()  # the labels need the limits and the height
        _names_at_ends(axes, [(own.mean[-1], own.x[-1], row) for row, (_, own) in found.items()], style.labels)
    else:
        shown = [row for row in found if row not in behind]
        figure, panels = _panels(style, shown, name, f"test {in_text(comparison.primary)}")
        for axes, row in zip(panels, shown, strict=True):
            for other in behind:
                draw(axes, other, "-" if other.group.method == "local" else "--", CONTEXT)
            draw(axes, row)
            _mark_target(axes, comparison, [row], against)
        for other in behind:
            end, looks = (found[other][1].x[-1], found[other][1].mean[-1]), {"color": CONTEXT, "fontsize": style.ticks}
            _text(panels[0], other.label, end, (0, -1.1 * style.ticks), "right", **looks)
    figure.axes[0].xaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))  # the panels share it
    if against == "bytes":
        figure.axes[0].xaxis.set_major_formatter(EngFormatter("B"))
    longest = max((own.x for own, _ in found.values()), key=len)
    rounds = dict.fromkeys(longest[np.linspace(0, len(longest) - 1, 5).round().astype(int)])
    table = []
    for row, (own, _) in found.items():
        means = dict(zip(own.x, own.mean, strict=True))
        cells = [f"{means[n]:.3f}" if n in means else "" for n in rounds]
        ends = (f"{own.low[-1]:.3f}", f"{own.high[-1]:.3f}") if own.x[-1] == longest[-1] else ("", "")
        table.append((row.label, *cells, *ends))
    headers = ("method", *(f"round {n:.0f}" for n in rounds), "lowest", "highest")
    note = "Mean over seeds by round; band, and lowest and highest: seeds, in the table in the last round"
    return figure, Table(title(comparison, in_words=True), headers, tuple(table), (note, *comparison.objections))


def _mark_target(axes: Axes, comparison: Comparison, rows: Sequence[Row], against: Against) -> None:
    """Draw a line at the target that the caller has set, and a tick on the x axis where a seed reaches it."""
    target = comparison.target
    if target is None or not target.given:
        return
    axes.axhline(float(np.mean([*target.goals.values()])), color=CONTEXT, linewidth=0.5)
    for number, row in enumerate(rows):  # above each other, since some reach it in the same round
        pairs, looks = zip(row.group.runs, row.hits, strict=True), {"color": row.who.light, "markersize": 4}
        ticks = [curve_points(run, against)[hit][0] for run, hit in pairs if hit is not None]
        axes.plot(
            ticks, [0.03 * number] * len(ticks), "|", transform=axes.get_xaxis_transform(), clip_on=False, **looks
        )


def _names_at_ends(axes: Axes, found: Sequence[tuple[float, float, Row]], size: float) -> None:
    """Write names at the last points of curves: at least a line apart beside those that end together, else above.

    Args:
        axes: of the curves.
        found: y and x of each last point, and the row.
        size: of the font.
    """
    low, high = axes.get_ylim()
    line = 1.05 * size * (high - low) * axes.figure.dpi / 72 / axes.get_window_extent().height
    longest = max(x for _, x, _ in found) or 1.0
    every = grouped((round(10 * end[1] / longest), end) for end in sorted(found, key=lambda end: end[0]))
    for ends in every.values():
        places = [ends[0][0]]
        for y, *_ in ends[1:]:
            places.append(max(y, places[-1] + line))
        up = np.mean(places) - np.mean([y for y, *_ in ends])
        move, side = ((0, 0.9 * size), "center") if len(ends) == 1 < len(every) else ((4, 0), "left")
        for (_, x, row), place in zip(ends, places, strict=True):
            looks = {"color": row.who.light, "path_effects": _halo()}
            _text(axes, row.label, (x, place - up), move, side, **looks)


def draw_clients(comparison: Comparison, style: Style) -> Drawn:
    """Draw every client of every seed in the order of the reference's results, with what a method gains or loses."""
    values, metric, reference = client_table(comparison), comparison.primary, comparison.reference.label
    found = [(line, line.deltas[0]) for line in comparison.lines if line.deltas[0]]
    who = "clients, mean over seeds" if comparison.families[0].same_clients else "clients of all seeds"
    order = f"{who}, by the result of {reference}"
    figure, panels = _panels(style, [line for line, _ in found], order, f"test {in_text(metric)}")
    x, table, sign, theirs = np.arange(len(values)), [], 1 if comparison.higher else -1, values[reference].to_numpy()
    for axes, (line, d) in zip(panels, found, strict=True):
        ours, colour = values[line.label].to_numpy(), line.who.light
        gain = sign * (ours - theirs).round(12)
        axes.plot(x, theirs, "_", color=CONTEXT, markersize=2, markeredgewidth=0.6)
        for chosen, edge, face in ((gain < 0, INK, "white"), (gain > 0, colour, colour)):
            axes.vlines(x[chosen], theirs[chosen], ours[chosen], color=edge, linewidth=0.4)
            dots = {"markersize": 1.8, "markeredgewidth": 0.4, "markerfacecolor": face, "markeredgecolor": edge}
            axes.plot(x[chosen], ours[chosen], "o", **dots)
        axes.set_xlabel(f"{d.worse} of {d.pairs} worse", color=CONTEXT, fontsize=style.ticks)
        axes.set_xticks([])
        ends = [points(sign * end, metric) for end in (np.nanmin(gain), np.nanmax(gain))]
        table.append((line.label, *map(str, (d.better, d.equal, d.worse)), *ends))
    headers = ("method", "better", "equal", "worse", "worst difference", "best difference")
    unit = POINTS * bool(scale_of(metric)[2])
    note = f"{who.capitalize()}, compared with {reference}; differences of single clients{unit}"
    marks = f"Dashes: {reference}; filled marks: better, hollow: worse"
    return figure, Table(title(comparison, in_words=True), headers, tuple(table), (note, marks, _round(comparison)))


def _round(comparison: Comparison) -> str:
    return f"Round: {CHOSEN[comparison.choice]}"


def draw_cost(comparison: Comparison, style: Style) -> Drawn:
    """Draw the primary metric by the bytes of the whole run; marks off the frontier are small."""
    from matplotlib.ticker import EngFormatter

    worth, sizes = frontier(comparison), {row: row.figures["bytes_total"].mean for row in comparison.lines}
    sent = [size for size in sizes.values() if size] or [1.0]
    none, without = min(sent) / 3, not all(sizes.values())  # where runs without bytes are
    at = {row: (size or none, row.figures["mean"].mean) for row, size in sizes.items()}
    figure = new_figure(style, style.column, min(style.column * 0.7, HEIGHT))
    axes = figure.add_subplot(xscale="log", axisbelow=True)
    axes.margins(0.12, 0.08)
    steps = np.array([*map(at.__getitem__, worth), (max(x for x, _ in at.values()), at[worth[-1]][1])])
    axes.step(*steps.T, where="post", color=CONTEXT, linewidth=0.8)
    for row, place in at.items():
        axes.plot(*place, **mark_of(row.who, "clear", 5 if row in worth else 3.5))
    low, high = axes.get_ylim()
    more = max(2.5 * comparison.least - (high - low), 0) / 2
    axes.set_ylim(low - more, high + more)
    axes.grid(axis="y", color=GRID)
    axes.set(xlabel="bytes in both directions, all clients, whole run", ylabel=f"test {in_text(comparison.primary)}")
    ticks = log_axis(sent).ticks
    axes.set_xticks([*[none] * without, *ticks], [*["none"] * without, *map(EngFormatter("B"), ticks)])
    axes.minorticks_off()
    if without:  # this place is not on the scale
        break_ = {"ha": "center", "va": "center", "transform": axes.get_xaxis_transform(), "color": CONTEXT}
        axes.text(1.3 * none, 0, "//", **break_, bbox={"color": "white", "pad": 0.5})
    figure.draw_without_rendering()  # sets the scale of the axes, which the names need
    marks = [(row, at[row], row in worth) for row in dict.fromkeys([*worth, *at])]
    _names_with_room(axes, marks, style.ticks, steps)
    table = [
        (row.label, format_bytes(sizes[row]), f"{row.figures['mean'].mean:.3f}", "yes" * (row in worth))
        for row in sorted(sizes, key=sizes.__getitem__)
    ]
    headers = ("method", "bytes", in_text(comparison.primary), "frontier")
    clearly = "clearly " * (comparison.seeds > 1)
    line = f"Frontier: each {clearly}better than the one with fewer bytes before it"
    notes = ("Bytes: both directions, all clients, whole run", line, _round(comparison))
    return figure, Table(title(comparison, in_words=True), headers, tuple(table), notes)


def draw_calibration(comparison: Comparison, style: Style) -> Drawn:
    """Draw the observed share of class 1 by its probability, with a band; without scores, an empty figure says why."""
    found, notes = calibrations(comparison)
    rows, name = [row for row in shown(comparison) if row.label in found], second_class(comparison)
    if found:
        figure, panels = _panels(style, rows, f"probability of {name}", f"share of {name}")
    else:
        figure, panels = new_figure(style, style.column, 0.6), []
        figure.text(0.5, 0.5, textwrap.fill(notes[0], 60), ha="center", va="center", fontsize=style.ticks)
    for axes, row in zip(panels, rows, strict=True):
        own = found[row.label]
        axes.plot([0, 1], [0, 1], color=CONTEXT, linewidth=0.8)
        axes.fill_between(own.p, own.low, own.high, color=row.who.light, alpha=0.2, linewidth=0)
        axes.plot(own.p, own.observed, color=row.who.light, linewidth=1.1)
        axes.set(xlim=(0, 1), ylim=(0, 1))
    names = [*next(iter(found.values())).metrics] if found else []
    table = [(row.label, *(f"{found[row.label].metrics[name]:.3f}" for name in names)) for row in rows]
    band = "Test rows of all clients and seeds; band: 95%, with clients as clusters; numbers: mean over seeds"
    what = "Calibration" + title(comparison, in_words=True).removeprefix(f"Test {in_text(comparison.primary)}")
    headers = ("method", *map(in_text, names))
    return figure, Table(what, headers, tuple(table), (band, _round(comparison), *notes))


def _halo() -> list[Any]:
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2, foreground="white")]


def _names_with_room(
    axes: Axes, found: Sequence[tuple[Row, tuple[float, float], bool]], size: float, steps: np.ndarray
) -> None:
    """Write names beside points where they cover neither points nor names nor the line.

    Args:
        axes: of the points.
        found: row, place, and whether the name is in colour; the first have the choice.
        size: of the font.
        steps: the corners of the line, [corners, 2], where it goes up, and its end.
    """
    from matplotlib.transforms import Bbox

    dot, places = axes.figure.dpi / 72, [axes.transData.transform(at) for _, at, _ in found]
    taken = [Bbox.from_bounds(x - 3 * dot, y - 3 * dot, 6 * dot, 6 * dot) for x, y in places]
    corners = axes.transData.transform(steps)
    for (x, y), (end, up) in zip(corners, [*corners[1:], corners[-1]], strict=True):
        taken += [Bbox([[x, y - dot], [end, y + dot]]), Bbox([[end - dot, min(y, up)], [end + dot, max(y, up)]])]
    near = [next(n for n, at in enumerate(places) if math.dist(at, place) < 3 * dot) for place in places]
    for number, alike in grouped(zip(near, found, strict=True)).items():
        (first, at, coloured), (x, y) = alike[0], places[number]
        lines = textwrap.wrap(listed([row.label for row, *_ in alike]), 24)  # of marks that cover each other
        wide = size * dot * max(sum(0.75 if letter.isupper() else 0.52 for letter in line) for line in lines)
        high = size * dot * (1.2 * len(lines) - 0.2)
        above = [(side, 0, up) for side in ("center", "left", "right") for up in (8, -8, 16, -16)]
        sides = [("left", 5, 0), ("right", -5, 0), *above]
        for side, right, up in sides:
            left = x + right * dot - wide * {"left": 0, "center": 0.5, "right": 1}[side]
            box = Bbox.from_bounds(left, y + up * dot - high / 2, wide, high)
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and axes.bbox.y0 <= box.y0
            if inside and not any(map(box.overlaps, taken)):
                taken.append(box)
                colour, weight = (first.who.light, "bold") if coloured else (CONTEXT, "normal")
                looks = {"fontsize": size, "fontweight": weight, "path_effects": _halo()}
                if abs(up) > 8:  # a line leads to the mark
                    looks["arrowprops"] = {"arrowstyle": "-", "color": CONTEXT, "linewidth": 0.4, "shrinkB": 2}
                _text(axes, "\n".join(lines), at, (right, up), side, color=colour, **looks)
                break


DRAWN: dict[str, Callable[..., Drawn]] = {
    "forest": draw_forest, "curves": draw_curves, "clients": draw_clients, "cost": draw_cost,
    "calibration": draw_calibration,
}  # fmt: skip
"""The figures by name."""
