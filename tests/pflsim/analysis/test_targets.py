"""The first round in which runs reach a target, and what it costs."""

import csv
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_runs import made

from pflsim.analysis.comparison import compare
from pflsim.analysis.drawings import STYLES, draw_curves
from pflsim.analysis.groups import group_runs
from pflsim.analysis.tables import figures, render
from pflsim.analysis.targets import find_target
from pflsim.errors import SettingsError
from pflsim.records.evaluation import Scope
from pflsim.records.history import METRICS

TEST, VAL = (Scope("personal", split, "trained") for split in ("test", "val"))


def run_of(means: Sequence[float], *, every: int = 1, higher: bool = True, val: Sequence[float] = (), seed: int = 0):
    """A run whose primary metric has these means over clients; its last round is chosen."""

    def at(place: int) -> dict[Scope, Any]:
        each = {TEST: means[place], **({VAL: val[place]} if val else {})}
        return {
            scope: SimpleNamespace(score=mean if higher else -mean, primary=SimpleNamespace(mean=mean))
            for scope, mean in each.items()
        }

    history = [SimpleNamespace(round=every * (n + 1), evaluations=at(n)) for n in range(len(means))]
    has = {"last": history[-1], "best_val": history[-1] if val else None}
    return SimpleNamespace(seed=seed, higher=higher, reported=TEST, history=history, at=has.get, folder="run")


@pytest.mark.parametrize(
    ("means", "more", "asked", "goal", "first"),
    [
        ([0.3, 0.6, 0.4, 0.7], {"every": 2}, 0.5, 0.5, 4),
        ([3, 2, 1], {"higher": False}, 2, 2, 2),
        ([0.7, 0.8], {}, "95%", 0.76, 2),
        ([3, 2, 1], {"higher": False}, "50%", 2, 2),
        ([0.3, 0.4], {}, "0.5", 0.5, None),
        ([0.1, 0.2, 0.3], {"val": [0.1, 0.5, 0.4], "on": "val"}, "100%", 0.4, 2),
        ([0.1, 0.2, 0.3], {"val": [0.1, 0.5, 0.4], "on": "val"}, None, 0.5, 2),
        ([3, 2, 1.006], {"higher": False}, None, 1.01, 3),
    ],
)
def test_the_first_round_that_is_as_good(means: list[float], more: Any, asked: Any, goal: float, first: Any) -> None:
    on = more.pop("on", "test")
    run: Any = run_of(means, **more)
    target = find_target(asked, on, [run], [run], "last")
    assert target and target.goals[0] == pytest.approx(goal)
    line = target.first(run)
    assert (line and line.round) == first


@pytest.mark.parametrize(
    ("asked", "on"), [("0%", "test"), ("101%", "test"), ("nan", "test"), ("x", "test"), (1, "val")]
)
def test_refusals(asked: Any, on: Any) -> None:
    run: Any = run_of([0.5])
    with pytest.raises(SettingsError, match="--target-on" if on == "val" else str(asked)):
        find_target(asked, on, [run], [run], "last")


def rates(*rights: int) -> list[list[tuple[int, int]]]:
    return [[(right, 10), (right, 10)] for right in rights]


def test_seeds_that_do_not_reach_it_and_times_fewer_rounds(tmp_path: Path) -> None:
    """Each seed has a goal of its own: 75% of Local's 0.8 and 0.4."""
    histories = {
        ("local", 0): rates(2, 4, 6, 8), ("local", 1): rates(1, 2, 3, 4), ("fedavg", 0): rates(6, 6, 6, 6),
        ("fedavg", 1): rates(2, 3, 3, 3), ("ditto", 0): rates(7, 7, 7, 7), ("ditto", 1): rates(1, 1, 1, 1),
    }  # fmt: skip
    runs = [made(tmp_path / f"{m}{s}", own, method=m, seed=s) for (m, s), own in histories.items()]
    comparison = compare(group_runs(runs), choice="last", target="75%")
    local, fedavg, ditto = comparison.rows
    assert (local.hits, fedavg.hits, ditto.hits) == ((3, 3), (1, 2), (1, None)) and ditto.reached == 1
    assert fedavg.figures["times_fewer_rounds"].values == (3.0, 1.5) and "times_fewer_rounds" not in ditto.figures
    assert fedavg.figures["seconds_to_target"].values == (2.0, 4.0)
    assert fedavg.figures["up_to_target"].values == (20, 40) and fedavg.figures["bytes_to_target"].values == (60, 120)
    table = figures(comparison)
    shown = {row[0]: dict(zip(table.headers, row, strict=True)) for row in table.rows}
    assert [shown[name]["rounds\nto 75%"] for name in ("Local", "FedAvg", "Ditto")] == ["3", "1–2", "1 of 2"]
    assert [shown[name]["times fewer\nrounds"] for name in ("Local", "FedAvg", "Ditto")] == ["1.00", "2.25", "—"]
    assert shown["FedAvg"]["seconds\nto 75%"].startswith("3.000") and shown["Ditto"]["seconds\nto 75%"] == "1 of 2"
    for run in runs:
        os.utime(run.folder / METRICS, (0, 0))
    assert "seconds\nto 75%" not in figures(comparison).headers  # the runs overlap
    by_label = {row["label"]: row for row in csv.DictReader(io.StringIO(render([comparison], "csv")))}
    assert (
        by_label["ditto"]["rounds_to_target_by_seed"].split()[0] == "1" and not by_label["ditto"]["up_to_target_mean"]
    )
    plain = render([compare(group_runs(runs), choice="last")], "text")
    assert not re.search("times fewer|seconds\n", plain)


def test_curves_have_a_line_at_the_target_and_a_tick_where_a_seed_reaches_it(tmp_path: Path) -> None:
    runs = [made(tmp_path / m, rates(*own), method=m) for m, own in {"local": (2, 5, 6), "fedavg": (1, 2, 6)}.items()]
    for asked, lines in ((None, 0), (0.5, 3)):
        figure, _ = draw_curves(compare(group_runs(runs), choice="last", target=asked), STYLES["icml"])
        (axes,) = figure.axes
        found = [line.get_data() for line in axes.lines]
        assert len(found) == 2 + lines
        ticks = [[*x] for x, y in found if [*y] in ([0], [0.03])]
        assert sorted(ticks) == ([[2], [3]] if asked else [])
