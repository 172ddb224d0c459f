"""The forest plot: its rows and axis from made-up differences, and its characters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import made

from pflsim.analysis.charts import limits_of
from pflsim.analysis.comparison import Row, Spread, compare
from pflsim.analysis.forest import as_text
from pflsim.analysis.groups import group_runs
from pflsim.analysis.report.charts import Benchmark, overall
from pflsim.cli import main
from pflsim.display.identity import identity

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
    return SimpleNamespace(
        primary="accuracy", higher=higher, least=0.04, reference=SimpleNamespace(label="Local"), beside=(), baselines=()
    )


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


def test_an_error_is_better_on_the_left() -> None:
    rows = [line("fedrep", -3.0, 1.0, "clear"), line("ifca", 1.0, 1.0, "not clear"), line("fedavg", 90.0, 1.0, "clear")]
    drawn = plot(rows, higher=False)
    assert drawn[0].index("better than Local │ worse") and "▸" in drawn[4] and "+90.0" in drawn[4]
