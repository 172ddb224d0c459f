"""The forest plot: its rows and axis from made-up differences, and its characters."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import made
from rich.cells import cell_len
from rich.console import Console

from pflsim.analysis.charts import limits_of
from pflsim.analysis.comparison import Comparison, Row, Spread, compare
from pflsim.analysis.forest import as_text
from pflsim.analysis.groups import group_runs
from pflsim.analysis.report.charts import Benchmark, overall
from pflsim.analysis.report.page import page as report
from pflsim.analysis.runs import find_runs, read_run
from pflsim.analysis.tables import forest_text, render
from pflsim.cli import main
from pflsim.display.identity import MARKS, identity

pytestmark = pytest.mark.slow

OTHERS = ["fedrep", "ifca", "fedavg", "ditto", "pfedme", "scaffold"]
finite = st.floats(-80, 80).map(lambda x: round(x, 3))


Ends = tuple[float, float] | float | None
NONE: Any = None


def line(method: str, mean: float = 0.0, ends: Ends = None, level: Any = None, seeds: Sequence[float] = ()) -> Row:
    """A method with a difference in points, and the ends of its interval or half of it; the reference has no level."""
    low, high = ends if isinstance(ends, tuple) else (mean - (ends or 0), mean + (ends or 0))
    over_seeds = (None, None) if ends is None else (low / 100, high / 100)
    by_seed = [each / 100 for each in seeds]
    d: Any = level and SimpleNamespace(mean=mean / 100, by_seed=by_seed, over_seeds=over_seeds, level=level)
    group: Any = SimpleNamespace(label=identity(method).display, method=method)
    return Row(group, NONE, (), 0, {"mean": Spread((0.5,)), "worst_decile": Spread((0.4,))}, (d,))


def about(higher: bool = True) -> Any:
    return SimpleNamespace(primary="accuracy", higher=higher, least=0.04, reference=SimpleNamespace(label="Local"))


def plot(lines: Sequence[Row], width: int = 80, higher: bool = True) -> list[str]:
    """The lines of the plot."""
    return as_text(about(higher), [*lines, line("local")], width).plain.splitlines()


def axis(*found: tuple[float, Sequence[float], Ends], higher: bool = True) -> list[float]:
    """The ends of the axis of means, seeds and intervals."""
    lines = [line("fedrep", mean, ends, "clear", seeds) for mean, seeds, ends in found]
    return [100 * end for end in limits_of(about(higher), lines)]


@given(st.lists(st.tuples(finite, st.floats(0, 30)), min_size=1, max_size=6), st.sampled_from([60, 61, 80, 200]))
def test_an_interval_touches_zero_if_it_has_zero(found: list[tuple[float, float]], width: int) -> None:
    rows = [line(OTHERS[n], mean, half, "not clear") for n, (mean, half) in enumerate(found)]
    lines = plot(rows, width)
    zero = lines[0].index("│")
    assert max(map(len, lines)) <= width
    for shown, text in zip(rows, lines[2:], strict=False):
        low, high = cast(Any, shown.deltas[0]).over_seeds
        inside = low <= 0 <= high
        assert (text[zero] in "┼◦") if inside else (text[zero] == "│"), (shown, text)
        side = text[:zero] if high < 0 else text[zero + 1 :]
        assert inside or set(side) & set("─◦◂▸"), "an interval that excludes 0 is on its side"


def test_marks_by_evidence() -> None:
    levels = [("fedrep", "clear"), ("ifca", "on these clients only"), ("fedavg", "not clear")]
    lines = plot([line(method, 9.0, 1.0, level) for method, level in levels])
    assert [next(mark for mark in "★○◦" if mark in text) for text in lines[2:5]] == ["★", "○", "◦"]
    assert "●" in lines[5] and "+9.0" in lines[2] and "0.0" not in lines[5]
    one_seed = "\n".join(plot([line("fedrep", 9.0, None, "not clear")]))
    assert "◦" in one_seed and "─" not in one_seed and "one seed" in one_seed


def test_every_character_takes_one_cell() -> None:
    glyphs = [glyph for glyph, _ in MARKS.values()]
    assert all(cell_len(glyph) == 1 for glyph in (*glyphs, *"○◦◂▸─┼│−…"))
    assert len({*glyphs}) == len(glyphs)


def test_the_axis_leaves_out_what_is_far_behind() -> None:
    low, high = axis((0.4, (0.1, 0.7), None), (-0.5, (-3.0, 2.0), None), (-54.1, (-55.0, -53.0), None))
    assert -4 < low < -3 and 2 < high < 3, "means and seeds of the better half, and a margin"
    near = [line("fedrep", 0.4, 5.0, "not clear", (0.1, 0.7)), line("ifca", -0.5, 1.0, "not clear", (-3.0, 2.0))]
    lines = plot([*near, line("fedavg", -54.1, 2.0, "clear")])
    assert "◂■" in lines[4] and "−54.1" in lines[4], "the mark says how clear it is"
    seen = plot([*near, line("fedavg", -54.1, 60.0, "on these clients only")])
    assert "◂○─" in seen[4] and "▸" in seen[4]
    assert axis((-54.1, (), None))[0] < -54.1, "a single method is shown"
    assert axis((0.0, (), None)) == [-2.0, 2.0]


@pytest.mark.parametrize("higher", [True, False])
def test_the_axis_has_intervals_up_to_twice_the_better_half(higher: bool) -> None:
    sign = 1 if higher else -1
    wide, wider, beyond = ((sign * -6.0, sign * 14.0), (sign * -50.0, sign * 56.0), (-95.0, 95.0))

    def limits(*intervals: Ends) -> list[float]:
        found = [(sign * m, [sign * 5.0], ends) for m, ends in zip((4.0, 3.0, -90.0), intervals, strict=False)]
        return sorted(sign * end for end in axis(*found, higher=higher))

    low, high = limits(None, wide, beyond)
    assert -7 < low < -6 and 8 < high < 9, "the means reach 4, so intervals reach 8, whatever the seeds"
    low, high = limits(wider, wider, beyond)
    assert -9 < low < -8 and 8 < high < 9
    low, high = limits(None, wide)
    assert -1 < low <= 0 and 5 < high < 6, "of the better half only"


def test_the_page_has_the_axis_of_the_terminal(tmp_path: Path) -> None:
    """Also with a panel for each of several benchmarks."""
    rights = {"local": 50, "ditto": 51, "fedrep": 52, "fedavg": 10}
    found = compare(group_runs(made(tmp_path / m, [[(n, 100)] * 3], method=m) for m, n in rights.items()))
    limits, page = limits_of(found, found.lines), Benchmark(found, found, None)
    assert limits[0] > -0.09, "FedAvg is beyond it"
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert '<use href="#k-dot" x="14" class="k na"/>' in (tmp_path / "page.html").read_text(), "and not clear"
    for each in (page.delta_axis(), overall([page, page])[1]):
        assert (each.low, each.high) == pytest.approx(limits)


def test_the_second_reference_has_intervals_over_seeds_too(tmp_path: Path) -> None:
    """IFCA is ahead of FedAvg by 1, 5 and 9 of 100: over seeds 5 ± 4.303 · 4/√3, that is −4.9 to 14.9."""
    gains = {"local": (0, 0, 0), "fedavg": (0, 0, 0), "ifca": (1, 5, 9)}
    for (method, own), seed in product(gains.items(), range(3)):
        made(tmp_path / f"{method}{seed}", [[(50 + own[seed], 100)] * 8], method=method, seed=seed)
    found = compare(group_runs(map(read_run, find_runs([str(tmp_path / "*")]))))
    second = Benchmark(found, found, None).delta_axis(1)
    assert second.low < -0.049 and 0.1 < second.high < 0.11, "to the right up to twice the largest mean"
    row = re.search(
        r"<tr[^>]*>(?:(?!</tr>).)*IFCA(?:(?!</tr>).)*</tr>", report(find_runs([str(tmp_path / "*")])), re.DOTALL
    )
    assert row is not None
    ends = re.findall(r'<line x1="([-\d.]+)%" x2="([-\d.]+)%" [^>]*class="ci', row[0])
    assert float(ends[1][0]) == pytest.approx(second.at(-0.04937), abs=0.1) and float(ends[1][1]) == 100
    one = report(find_runs([str(tmp_path / "*0")]))
    assert one.count('class="ci') == 0, "with one seed there is no interval"


def test_an_error_is_better_on_the_left() -> None:
    rows = [line("fedrep", -3.0, 1.0, "clear"), line("ifca", 1.0, 1.0, "not clear"), line("fedavg", 90.0, 1.0, "clear")]
    drawn = plot(rows, higher=False)
    assert drawn[0].index("better than Local │ worse") and "▸" in drawn[4] and "+90.0" in drawn[4]


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """Three seeds of eight clients: FedRep is better by 10 to 17 examples of 100, Ditto by 0."""
    found = []
    for seed in range(3):
        for method, gain in (("local", 0), ("fedrep", 10), ("ditto", 0)):
            rights = [(40 + gain + bool(gain) * n + seed, 100) for n in range(8)]
            found.append(made(tmp_path / f"{method}{seed}", [rights], method=method, seed=seed))
    return compare(group_runs(found))


def test_the_rows_are_those_of_the_comparison(comparison: Comparison) -> None:
    assert [shown.label for shown in comparison.lines] == ["FedRep", "Local", "Ditto"]
    first, reference, last = (shown.deltas[0] for shown in comparison.lines)
    assert first and last and first.mean == pytest.approx(0.135)
    assert first.by_seed == pytest.approx((0.135,) * 3) and first.over_seeds == pytest.approx((0.135, 0.135))
    assert (first.level, reference, last.level) == ("clear", None, "not clear")
    text = render([comparison], "text")
    assert text.index("better than Local") < text.index("is clearly better") < text.index("reported")
    assert "│" not in render([comparison], "markdown")


def test_runs_that_cannot_be_compared_have_no_plot(tmp_path: Path) -> None:
    alone = compare(group_runs([made(tmp_path / "a", [[(1, 2)]])]))
    unlike = [made(tmp_path / m, [[(1, 2)]], method=m, digest=m[0] * 64) for m in ("local", "ditto")]
    for each in (alone, compare(group_runs(unlike))):
        assert forest_text(each, Console()) == ""


@pytest.mark.parametrize(
    ("environment", "terminal", "coloured"),
    [
        ({"COLORTERM": "truecolor"}, True, True),
        ({"COLORTERM": "truecolor", "NO_COLOR": "1"}, True, False),
        ({"COLORTERM": "truecolor"}, False, False),
    ],
)
def test_colours(
    comparison: Comparison, environment: dict[str, str], terminal: bool, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLORFGBG"):
        monkeypatch.delenv(name, raising=False)
    screen = {"TERM": "xterm-256color", **environment}
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: terminal, raising=False)
    text = forest_text(comparison, Console(file=file, width=80, _environ=screen))
    colour = identity("fedrep").dark
    code = ";".join(str(int(colour[n : n + 2], 16)) for n in (1, 3, 5))
    assert (f"38;2;{code}" in text) == coloured and ("38;2" in text) == coloured
    assert ("\x1b" in text) == terminal
