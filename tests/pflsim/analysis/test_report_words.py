"""Whether a difference is clear, and how it is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_runs import made, make_run

from pflsim.analysis.compare.words import plural
from pflsim.analysis.report.rows import row_of
from pflsim.analysis.report.verdict import in_short
from pflsim.analysis.report.words import listed, spans
from pflsim.analysis.report.worst import clients_needed, worst_decile, worst_gap
from pflsim.analysis.results import Group, group_runs


def group(folder: Path, *seeds: list[int], method: str = "fedavg", total: int = 100, **settings: object) -> Group:
    """One run a seed, of one round: how many examples every client gets right."""
    runs = [
        made(folder / f"{method}-{n}", [[(right, total) for right in rights]], method=method, seed=n, **settings)
        for n, rights in enumerate(seeds)
    ]
    (found,) = group_runs(runs)
    return found


def said(*groups: Group) -> dict[str, str]:
    rows = [row for each in groups if (row := row_of(each, "last")) is not None]
    return {point.about: point.text for point in in_short(rows, "last")}


@pytest.mark.parametrize("n", [1, 9, 10, 11, 20, 25])
def test_worst_decile(n: int) -> None:
    rates = np.random.default_rng(n).random((3, n))
    for row, found in zip(rates, worst_decile(rates), strict=True):
        lowest = sorted(row)[: (n + 9) // 10]
        assert found == pytest.approx(sum(lowest) / len(lowest), abs=1e-12)


def test_the_gap_is_that_of_the_worst_deciles_over_seeds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 101, (2, 2, 15)).tolist()
    gap = worst_gap(group(tmp_path, *one), group(tmp_path, *other, method="ditto"), "last")
    worst = [[sum(sorted(seed)[:2]) / 200 for seed in side] for side in (one, other)]
    assert gap is not None
    assert gap.mean == pytest.approx(np.mean(worst[0]) - np.mean(worst[1]))
    assert gap.low <= gap.mean <= gap.high


def test_the_interval_is_a_bootstrap_over_clients(tmp_path: Path) -> None:
    """Against a plain loop with other random numbers."""
    rng = np.random.default_rng(1)
    rights = rng.integers(20, 101, (2, 40))
    gap = worst_gap(group(tmp_path, rights[0].tolist()), group(tmp_path, rights[1].tolist(), method="ditto"), "last")
    drawn = []
    for _ in range(4000):
        picked = rng.integers(0, 40, 40)
        lowest = [sum(sorted(side[picked] / 100)[:4]) / 4 for side in rights]
        drawn.append(lowest[0] - lowest[1])
    low, high = np.percentile(drawn, [2.5, 97.5])
    assert gap is not None
    assert (gap.low, gap.high) == (pytest.approx(low, abs=0.015), pytest.approx(high, abs=0.015))


def test_the_same_clients_are_drawn_for_both(tmp_path: Path) -> None:
    rights = np.random.default_rng(2).integers(20, 81, 30)
    better, same = (rights + 10).tolist(), rights.tolist()
    one, other, twin = (
        group(tmp_path, numbers, method=name) for name, numbers in (("a", better), ("b", same), ("c", same))
    )
    gap, none = worst_gap(one, other, "last"), worst_gap(other, twin, "last")
    assert gap is not None and none is not None
    assert (gap.low, gap.high) == (pytest.approx(0.1), pytest.approx(0.1)) and gap.clear
    assert (none.low, none.mean, none.high) == (0, 0, 0) and not none.clear


def test_more_comparisons_widen_the_interval(tmp_path: Path) -> None:
    rights = np.random.default_rng(3).integers(0, 101, (2, 40)).tolist()
    groups = group(tmp_path, rights[0]), group(tmp_path, rights[1], method="ditto")
    one, many = worst_gap(*groups, "last"), worst_gap(*groups, "last", 9)
    assert one is not None and many is not None
    assert many.low < one.low and many.high > one.high


@pytest.mark.parametrize(("clients", "clear"), [(2, False), (5, False), (6, True)])
def test_a_few_clients_prove_nothing(tmp_path: Path, clients: int, clear: bool) -> None:
    """All of them do better, as two clients do by chance every other time."""
    groups = [group(tmp_path, list(range(n, n + clients)), method=method) for n, method in ((60, "one"), (20, "two"))]
    gap = worst_gap(groups[0], groups[1], "last")
    assert gap is not None and gap.low > 0 and gap.clear is clear
    assert ("one is best" in said(*groups)["Worst clients"]) is clear


@pytest.mark.parametrize("comparisons", [1, 2, 8, 23])
def test_how_many_clients_it_takes(comparisons: int) -> None:
    n, error = clients_needed(comparisons), 0.05 / comparisons
    assert 2 * 0.5**n < error <= 2 * 0.5 ** (n - 1)


def test_an_interval_begins_at_0_and_not_below(tmp_path: Path) -> None:
    groups = [group(tmp_path, [n, 50, 50, 50], method=method) for n, method in ((60, "one"), (40, "two"))]
    assert "difference 0.000 to " in said(*groups)["All clients"]


def test_clients_that_are_not_the_same_are_not_held_together(tmp_path: Path) -> None:
    one = group(tmp_path, [50] * 10, digest="a" * 64)
    other = group(tmp_path, [10] * 10, method="ditto", digest="b" * 64)
    assert worst_gap(one, other, "last") is None
    assert "cannot be held together client by client" in said(one, other)["Worst clients"]


def test_who_is_best_and_what_it_took(tmp_path: Path) -> None:
    rights = np.arange(30) + 40
    ahead = group(tmp_path, (rights + 20).tolist(), method="ahead", up=1000, down=1000)
    behind = group(tmp_path, rights.tolist(), method="behind", up=5000, down=5000)
    text = said(behind, ahead)
    assert text["Worst clients"] == (
        "for the worst tenth of the clients, ahead is best: 0.610 against behind (0.410; difference 0.200 to 0.200)."
    )
    assert text["Price"] == (
        "until the round of these figures, all clients and both ways, ahead took 60.0 kB. "
        "The other: behind took 300 kB (5.0 times as much)."
    )
    assert "ahead is best: 0.745 against behind (0.545; difference 0.200 to 0.200, p < 0.001)" in text["All clients"]
    assert "of one seed" in text["How sure"] and "So few seeds" in text["How sure"]


def test_an_interval_that_includes_0_is_not_clear(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    rights = rng.integers(30, 71, 30)
    one = group(tmp_path, (rights + rng.integers(-15, 17, 30)).tolist(), method="one", up=10, down=10)
    other = group(tmp_path, rights.tolist(), method="other", up=5, down=5)
    text = said(one, other)
    for about in ("Worst clients", "All clients"):
        assert "has the highest accuracy" in text[about] and "is not clear" in text[about]
    assert "Perhaps as good for the worst clients: " in text["Price"]


def test_three_methods(tmp_path: Path) -> None:
    """The first two are level for the worst, the third is behind."""
    rights = np.random.default_rng(5).integers(50, 81, 40)
    swapped = rights[::-1]
    text = said(
        group(tmp_path, rights.tolist(), method="one"),
        group(tmp_path, swapped.tolist(), method="two"),
        group(tmp_path, (rights - 40).tolist(), method="three"),
    )
    assert "one and two are best: " in text["Worst clients"]
    assert "against three" in text["Worst clients"]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_two_that_lead_are_better_only_where_both_are(tmp_path: Path, order: tuple[int, ...]) -> None:
    """The same worst decile, but one of them has it from clients that do well with the third method."""
    third = [20] * 5 + [60] * 15
    rights = {"steady": [30] * 5 + [70] * 15, "changed": [100] * 5 + [30] * 15, "third": third}
    groups = [group(tmp_path, found, method=method) for method, found in rights.items()]
    text = said(*(groups[n] for n in order))["Worst clients"]
    assert "have the highest accuracy, 0.300" in text
    assert "better than third" in text and "is not clear" in text


def test_many_methods_are_not_listed_one_by_one(tmp_path: Path) -> None:
    rights = np.arange(30) + 40
    groups = [
        group(tmp_path, (rights - 3 * n).tolist(), method=f"m{n}", up=0 if n == 5 else 10 + n, down=0) for n in range(8)
    ]
    text = said(*groups)
    assert text["Worst clients"].endswith(
        "m1 (0.380; difference 0.030 to 0.030), m2 (0.350; difference 0.060 to 0.060), "
        "m3 (0.320; difference 0.090 to 0.090) and 4 more, down to 0.200."
    )
    assert text["Price"].endswith("The others: m5 took nothing and 6 methods between 330 B (m1) and 510 B (m7).")


def test_equal_figures(tmp_path: Path) -> None:
    text = said(group(tmp_path, [50] * 10, method="one"), group(tmp_path, [50] * 10, method="two"))
    assert text["All clients"] == "for all clients on the mean, one and two have the same accuracy, 0.500."


def test_one_method_alone(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [[(5, 10), (9, 10)], [(6, 10), (10, 10)]])
    from pflsim.analysis.results import read_run

    text = said(*group_runs([read_run(tmp_path / "a")]))
    assert "0.800 of a client's test examples" in text["All clients"] and "round 2, the last" in text["All clients"]
    assert "0.600, the best tenth 1.000" in text["Worst clients"]
    assert text["Price"].startswith("120 B up to that round")


def test_lists_and_numbers() -> None:
    assert [listed(list(words)) for words in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]
    assert spans([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7, 8"
    assert [plural(1, "run"), plural(1200, "run")] == ["1 run", "1,200 runs"]
