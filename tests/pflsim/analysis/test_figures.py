"""Figures for papers: sizes, fonts, marks, and tables with the numbers of the comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_runs import made, make_run
from matplotlib.figure import Figure

import pflsim
from pflsim.analysis.charts import curve
from pflsim.analysis.comparison import Comparison, best_first, compare, frontier
from pflsim.analysis.drawings import DRAWN
from pflsim.analysis.figures import all_figures
from pflsim.analysis.groups import group_runs
from pflsim.cli import main
from pflsim.display.identity import NOT_CLEAR, identity
from pflsim.errors import SettingsError

pytestmark = pytest.mark.slow

GAINS = {
    "local": (0, 0, 0), "fedrep": (10, 11, 12), "ifca": (1, 9, 20), "ditto": (0, 0, 0), "fedavg": (-9, -8, -9),
    "apfl": (-1, -1, -2), "pfedme": (4, 5, 4),
}  # fmt: skip
"""Examples of 100 by which each client of a seed is better than with Local."""
BYTES = {"local": 0, "fedrep": 1000, "ifca": 3000, "ditto": 2000, "fedavg": 2000, "apfl": 2000, "pfedme": 500}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven methods, three seeds, ten clients, two rounds."""
    folder = tmp_path_factory.mktemp("runs")
    for method, gains in GAINS.items():
        for seed, gain in enumerate(gains):
            rounds = [[(30 + n + gain, 100) for n in range(10)], [(40 + n + gain + (n == 9), 100) for n in range(10)]]
            sent = {"up": BYTES[method], "down": BYTES[method]}
            make_run(folder / f"{method}-{seed}", rounds, method=method, seed=seed, **sent)
    return folder


@pytest.fixture(scope="module")
def comparison(runs: Path) -> Comparison:
    return compare(group_runs(pflsim.load(runs)))


def points(figure: Figure) -> dict[str, tuple[str, str, str]]:
    """Return marker, face and edge of the mean of each method of the forest plot, by its name."""
    axes = figure.axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    means = [line for line in axes.lines if line.get_markersize() in (4.5, 0.65 * 4.5) and line.get_marker() != "|"]
    return {
        names[int(np.asarray(line.get_ydata()).item())]: tuple(
            map(str, (line.get_marker(), line.get_markerfacecolor(), line.get_markeredgecolor()))
        )
        for line in means
    }  # type: ignore[return-value]


def test_marks_by_evidence(comparison: Comparison) -> None:
    levels = {d.group.label: d.level for d in comparison.differences}
    assert {levels[name] for name in ("FedRep", "IFCA", "Ditto")} == {"clear", "on these clients only", "not clear"}
    found = points(all_figures([comparison], only=["forest"])["forest"][0])
    fedrep, ifca, grey = identity("fedrep").light, identity("ifca").light, NOT_CLEAR["light"]
    assert found["FedRep"] == ("*", fedrep, fedrep) and found["IFCA"] == ("h", "white", ifca)
    assert found["Ditto"] == ("o", grey, grey) and found["Local"][0] == "o"


def test_the_tables_have_the_numbers_of_the_comparison(comparison: Comparison) -> None:
    found = {name: table.rows for name, (_, table) in all_figures([comparison]).items()}
    assert [*found] == [name for name in DRAWN if name != "calibration"]
    differences = {d.group.label: d for d in comparison.differences}
    rows = {row.group.label: row for row in comparison.rows}

    def number(cell: str) -> float:
        return float(cell.replace("−", "-"))

    for name, mean, worst, difference, low, high, level in found["forest"]:
        assert number(mean) == pytest.approx(rows[name].figures["mean"].mean, abs=5e-4)
        assert number(worst) == pytest.approx(rows[name].figures["worst_decile"].mean, abs=5e-4)
        if d := differences.get(name):
            ends = [100 * x for x in (d.mean, *d.over_seeds) if x is not None]
            assert [number(x) for x in (difference, low, high)] == pytest.approx(ends, abs=0.051) and level == d.level
    assert [row[0] for row in found["forest"]] == [row.group.label for row in best_first(comparison.rows)]
    for name, *counts, loss, gain in found["clients"]:
        d = differences[name]
        assert [*map(int, counts)] == [d.better, d.equal, d.worse]
        gains = GAINS[d.group.method]
        assert (number(loss), number(gain)) == (min(gains), max(gains))
    for name, first, last, low, high in found["curves"]:
        own = curve(rows[name].group)
        assert own and [number(x) for x in (first, last, low, high)] == pytest.approx(
            [*own.mean, own.low[-1], own.high[-1]], abs=5e-4
        )
    assert {name: size for name, size, *_ in found["cost"]}["FedRep"] == "40.0 kB"  # 10 clients, 2 rounds, both ways


def test_the_frontier_has_what_is_better_than_the_cheaper(comparison: Comparison, runs: Path) -> None:
    """Clearly better, or with one seed, with which nothing is clear, by the mean."""
    one_seed = compare(group_runs(run for run in pflsim.load(runs) if run.seed == 1))
    assert [row.group.method for row in frontier(comparison)] == ["local", "pfedme", "fedrep"]
    assert [row.group.method for row in frontier(one_seed)] == ["local", "pfedme", "fedrep"]


def test_the_command(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--style", "ieee", "--format", "svg", "--only", "forest,cost"]
    asked = ["figures", str(runs), *only, "--out", str(tmp_path / "out")]
    assert main(asked) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"forest.svg", "forest.tex", "cost.svg", "cost.tex"}
    table = (tmp_path / "out/forest.tex").read_text(encoding="utf-8")
    assert table.isascii() and r"\toprule" in table and "$-$8.7" in table
    for wrong in (["--only", "pie"], ["--reference", "moon"]):
        assert main([*asked, *wrong]) == 2
    assert "pie" in capsys.readouterr().err


def test_from_python(runs: Path, tmp_path: Path) -> None:
    found = pflsim.figures(runs, "neurips", only=["cost"], reference="fedavg")
    assert {*found} == {"cost"} and isinstance(found["cost"], Figure)
    panels = {
        axes.get_title(loc="left"): axes for axes in pflsim.figures(runs, only="curves", against="bytes")["curves"].axes
    }
    np.testing.assert_allclose(panels["FedRep"].lines[-1].get_xdata(), [20_000, 40_000])
    with pytest.raises(SettingsError, match="naturemag"):
        pflsim.figures(runs, "naturemag")  # type: ignore[arg-type]
    alone = made(tmp_path / "alone", [[(1, 2)]])
    assert {*pflsim.figures(alone)} == {"curves"}
    with pytest.raises(SettingsError, match="two methods"):
        pflsim.figures(alone, only="forest,cost")
    with pytest.raises(SettingsError, match="--at never: valid: "):
        pflsim.figures(alone, at="never")
    other = [made(tmp_path / m, [[(1, 2)] * 10], method=m, digest="f" * 64) for m in ("local", "ditto")]
    several = pflsim.figures([*pflsim.load(runs), *other], only=["forest"])
    assert {*several} == {"forest-1", "forest-2"}
