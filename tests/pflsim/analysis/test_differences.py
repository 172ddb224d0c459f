"""The estimand, the tests over clients and over seeds, and the levels, against numbers of independent programs."""

from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import scipy.stats
from pandas import DataFrame

from pflsim.analysis import differences
from pflsim.analysis.differences import (
    Difference,
    Family,
    Level,
    SeedTest,
    family,
    holm,
    interval,
    moderated,
    prior,
    two_way,
    wilcoxon,
)  # fmt: skip
from pflsim.analysis.groups import Group
from pflsim.display.metrics import steady

GROUP = Group("a", "a", {}, ())
SIGMA = np.sqrt(0.5)


def studies(rng: np.random.Generator, shape: tuple[int, int, int], same: bool, rho: float) -> np.ndarray:
    """Differences [methods, seeds, clients] without an effect, correlated through the reference.

    Seed effects have the standard deviation rho/√K, and with the `same` clients in every seed these have effects of .7.
    """
    m, s, k = shape
    parts = [(1.0, (s, k)), (rho / np.sqrt(k), (s, 1)), *([(0.7, (1, k))] if same else [])]
    return sum(  # type: ignore[return-value]
        size * SIGMA * (rng.normal(size=(m, *own)) + rng.normal(size=(1, *own))) for size, own in parts
    )


EXAMPLE = studies(np.random.default_rng(0), (4, 3, 6), False, 1.0) + np.array([1.0, 0.5, 0.0, -0.2])[:, None, None]


def compared(tables: np.ndarray, same: bool) -> Family:
    """The family of methods with these values [methods, seeds, clients] against a reference of zeros."""
    runs = tuple(
        SimpleNamespace(primary="rmse", higher=False, partition={}, partition_hash=str(n * (not same)))
        for n in range(tables.shape[1])
    )
    groups = [Group(name, name, {}, cast(Any, runs)) for name in ("base", *map(str, range(len(tables))))]
    values = {
        group.label: {seed: DataFrame({"rmse": row}) for seed, row in enumerate(table)}
        for group, table in zip(groups, [np.zeros(tables.shape[1:]), *tables], strict=True)
    }
    return family(groups, groups[0], values)


@pytest.mark.parametrize(
    ("same", "over_seeds", "over_clients"),
    [
        (False, [0.011364, 0.123405, 0.247086, 0.812077], [0.003357, 0.047791, 0.308090, 0.733727]),
        (True, [0.222464, 0.525128, 0.589921, 0.884559], [0.125000, 0.187500, 0.625000, 1.000000]),
    ],
)
def test_both_tests_after_holm(same: bool, over_seeds: list[float], over_clients: list[float]) -> None:
    """Numbers of an independent program with numpy and scipy."""
    found = compared(EXAMPLE, same)
    assert [d.seeds and d.seeds.p_holm for d in found.differences] == pytest.approx(over_seeds, abs=1e-6)
    assert [d.p_holm for d in found.differences] == pytest.approx(over_clients, abs=1e-6)
    assert found.prior == (None if same else pytest.approx((0.144990, 3.321599), abs=1e-6))
    assert found.differences[0].level == ("not clear" if same else "clear")


def test_the_prior_has_limits() -> None:
    """Equal variances are one variance; one alone, or none above 0, is no prior: ordinary t."""
    assert prior(np.array([2.0, 2.0, 2.0]), np.array([2, 2, 2]))[1] == np.inf
    (first, *_), _ = moderated(list(EXAMPLE + 1000 * np.arange(3)[None, :, None] * np.eye(4)[3][:, None, None]))
    assert first and first.error < 0.3  # although the last method diverged
    for tables in (EXAMPLE[:1], [EXAMPLE[0], 0 * EXAMPLE[0]]):
        (test, *others), found = moderated(list(tables))
        seeds = EXAMPLE[0].mean(1)
        assert found is None and test and test.df == 2 and test.error == pytest.approx(seeds.std(ddof=1) / 3**0.5)
        assert all(each and each.p == 1 for each in others)
    assert moderated([EXAMPLE[0][:1]]) == ([None], None) and two_way(EXAMPLE[0][:1]) is None
    equal = two_way(np.full((3, 4), 0.1))
    assert equal and equal.p < 1e-6


UNEVEN = np.array([[0.4, 0.2, np.nan, np.nan], [0.1, np.nan, np.nan, np.nan], [0.0, -0.1, 0.3, 0.1]])
"""Defined for two, one and four clients: the seeds' means are .3, .1 and .075; the mean over pairs is .143."""


@pytest.mark.parametrize("same", [False, True])
def test_each_seed_counts_the_same_whatever_its_number_of_clients(same: bool) -> None:
    (d,) = compared(UNEVEN[None], same).differences
    assert d.mean == pytest.approx(np.mean([0.3, 0.1, 0.075])) and d.by_seed == pytest.approx((0.3, 0.1, 0.075))
    assert (d.pairs, d.unmatched) == ((4, 5) if same else (7, 5))
    assert d.low is not None and d.high is not None and d.low < d.mean < d.high
    rng, drawn = np.random.default_rng(1), []
    for _ in range(4000):
        if same:
            own = UNEVEN[:, rng.integers(4, size=4)]
            own = own[~np.isnan(own).all(1)]
        else:
            own = [rng.choice(row := each[~np.isnan(each)], len(row)) for each in UNEVEN]
        drawn.append(np.mean([np.nanmean(row) for row in own]))
    assert (d.low, d.high) == pytest.approx(np.quantile(drawn, (0.025, 0.975)), abs=0.04)
    if same:  # only one client has all seeds
        assert d.seeds is None and d.level == "not clear"
    else:
        assert d.seeds and d.seeds.mean == pytest.approx(d.mean)


def test_the_two_way_test_is_on_clients_with_all_seeds() -> None:
    (whole,), (part,) = (compared(EXAMPLE[:1, :, :k], True).differences for k in (6, 5))
    hole = EXAMPLE[:1].copy()
    hole[0, 1, 5] = np.nan
    (d,) = compared(hole, True).differences
    assert d.seeds and part.seeds and whole.seeds
    assert (d.seeds.clients, whole.seeds.clients, d.seeds.p) == (5, 6, part.seeds.p)
    assert d.over_seeds == part.over_seeds and d.mean != part.mean
    alike = EXAMPLE[0] + 5 * np.arange(6)  # a client's seeds are drawn together, also if one is missing
    ends = interval(alike, True)
    alike[1, 2] = np.nan
    assert interval(alike, True) == pytest.approx(ends, abs=1.5)


@pytest.mark.parametrize("same", [False, True])
def test_another_seed_of_the_bootstrap_changes_the_last_digit_by_one(
    monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    rng, drawing = np.random.default_rng(2), scipy.stats.bootstrap
    shape, printed = (3, 20), list[list[str]]()
    tables = [rng.normal(size=shape), rng.exponential(size=shape), 1.0 * (rng.normal(size=shape) > 1)]
    for seed in range(8):
        monkeypatch.setattr(scipy.stats, "bootstrap", lambda *a, seed=seed, **k: drawing(*a, **{**k, "rng": seed}))
        texts = [steady(*interval(size * table, same), 1, 3) for table in tables for size in (0.02, 0.03, 0.06)]
        printed.append([end.strip("[]").replace("−", "-") for text in texts for end in text.split(", ")])
    for ends in zip(*printed, strict=True):
        unit = 10.0 ** -len(ends[0].partition(".")[2])
        values = [float(end) for end in ends]
        assert max(values) - min(values) < 1.5 * unit, ends
    assert len(set(printed[0])) > 6


@pytest.mark.parametrize(
    ("mean", "test", "low", "high", "p", "level"),
    [
        (0.1, (0.1, 0.04), 0.05, 0.15, 0.049, "clear"),
        (-0.1, (-0.1, 0.04), -0.15, -0.05, 0.0, "clear"),
        (0.1, (0.1, 0.05), 0.05, 0.15, 0.001, "on these clients only"),
        (0.1, (0.1, 0.04), 0.05, 0.15, 0.05, "not clear"),
        (0.1, (0.1, 0.04), -0.01, 0.15, 0.001, "not clear"),
        (0.1, (0.1, 0.04), -0.15, -0.05, 0.001, "not clear"),  # the interval is on the other side
        (0.1, (-0.1, 0.04), 0.05, 0.15, 0.001, "on these clients only"),  # the test over seeds is
        (0.1, (0.1, 0.04), 0.05, 0.15, None, "not clear"),
        (0.1, None, 0.05, 0.15, 0.001, "not clear"),
    ],
)
def test_levels(
    mean: float, test: tuple[float, float] | None, low: float, high: float, p: float | None, level: Level
) -> None:
    seeds = test and SeedTest(None, test[0], 1.0, 2.0, test[1])
    assert Difference(GROUP, 30, mean, (mean,), low, high, 20, 0, 10, p, p, seeds).level == level


def test_the_interval_over_seeds_is_that_of_the_test() -> None:
    test = SeedTest(None, 0.09933, 0.05776 / np.sqrt(3), 2.0)
    assert test.interval == pytest.approx((-0.04415, 0.24282), abs=1e-5)  # 0.09933 ± 4.30265 · 0.05776 / √3
    assert Difference(GROUP, 10, 0.1, (0.1,), 0.0, 0.2, 5, 0, 5, 0.1, 0.1).over_seeds == (None, None)


@pytest.mark.parametrize("values", [[0.1], [0.0], [0.1, 0.1, 0.1], [0.0, 0.1], [-0.1, 0.1], [0.0] * 30 + [0.1]])
@pytest.mark.parametrize("same", [False, True])
def test_few_pairs_give_no_warning(values: list[float], same: bool) -> None:
    low, high = interval(np.array([values]), same)
    assert (low is None) == (len(values) == 1)
    if low is not None and high is not None:
        assert min(values) - 1e-12 <= low <= np.mean(values) + 1e-12 and np.mean(values) <= high + 1e-12
    p = wilcoxon(np.array(values))
    assert p is not None and 0 < p <= 1


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([0.02, None, 0.5]) == [0.04, None, 0.5] and holm([]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("same", "methods", "rho"),
    [(False, 4, 2), (False, 40, 1), (False, 40, 2), (True, 4, 1), (True, 4, 2), (True, 40, 1)],
)
def test_the_error_rate_of_clear(monkeypatch: pytest.MonkeyPatch, same: bool, methods: int, rho: float) -> None:
    """400 studies of 20 clients and three seeds without any effect: something is clear in at most a tenth."""
    monkeypatch.setattr(differences, "interval", lambda table, same: (table.mean(),) * 2)  # no bootstraps
    monkeypatch.setattr(differences, "client_differences", lambda ours, *_: (ours, 0))
    rng, clear = np.random.default_rng([methods, same, rho]), 0
    for _ in range(400):
        clear += any(level == "clear" for level in levels(studies(rng, (methods, 3, 20), same, rho), same))
    assert clear <= 40


@pytest.mark.slow
def test_how_often_an_effect_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a client's standard deviation, one of 40 methods, other clients in each of three seeds."""
    monkeypatch.setattr(differences, "interval", lambda table, same: (table.mean(),) * 2)
    monkeypatch.setattr(differences, "client_differences", lambda ours, *_: (ours, 0))
    rng, found = np.random.default_rng(7), 0
    for _ in range(400):
        study = studies(rng, (40, 3, 20), False, 0)
        study[0] += 0.5
        found += levels(study, False)[0] == "clear"
    assert found >= 180


def levels(tables: np.ndarray, same: bool) -> list[Level]:
    """The levels of a family; `client_differences` gives the tables themselves."""
    runs = [SimpleNamespace(primary="", higher=True, partition={}, partition_hash=str(n * (not same))) for n in "ab"]
    groups = [Group(name, name, {}, cast(Any, tuple(runs))) for name in ("base", *map(str, range(len(tables))))]
    values = {"base": {}} | {group.label: table for group, table in zip(groups[1:], tables, strict=True)}
    return [d.level for d in family(groups, groups[0], cast(Any, values)).differences]


def signed_rank(values: np.ndarray) -> float:
    """The two-sided p-value by all signs of the ranks."""
    sizes = np.abs(values[values != 0])
    ranks = np.array([(sizes < x).sum() + ((sizes == x).sum() + 1) / 2 for x in sizes])
    sums = np.array([np.dot(signs, ranks) for signs in product((0, 1), repeat=len(ranks))])
    found = ranks[values[values != 0] > 0].sum()
    return min(1.0, 2 * min((sums >= found - 1e-9).mean(), (sums <= found + 1e-9).mean()))


def test_the_signed_rank_test_is_exact_with_few_pairs() -> None:
    rng = np.random.default_rng(1)
    for n in (1, 4, 6, 8, 10):
        for values in (rng.normal(0.1, 0.2, n), rng.choice([0.1, 0.2, 0.3], n), rng.choice([-0.1, 0.0, 0.1, 0.2], n)):
            assert wilcoxon(values) == pytest.approx(signed_rank(values) if values.any() else 1.0)


def test_ranks_that_point_against_the_mean_prove_nothing() -> None:
    """27 clients lose little and three win much: most are worse, although the mean is better."""
    values = np.array([-0.001 * n for n in range(1, 28)] + [0.6, 0.7, 0.8])
    assert values.mean() > 0.05 and wilcoxon(values) == 1.0
    assert (wilcoxon(values[:27]) or 1) < 1e-6


@pytest.mark.parametrize(("pairs", "tests", "needed"), [(5, 1, 6), (6, 1, 6), (8, 11, 9), (9, 11, 9), (10, 35, 11)])
def test_how_many_pairs_a_correction_needs(pairs: int, tests: int, needed: int) -> None:
    """The smallest p-value is that of `pairs` differences with one sign, times the number of tests."""
    found = Family(GROUP, (Difference(GROUP, pairs, 0.1, (0.1,), 0.0, 0.2, pairs, 0, 0, 0.1, 0.1),) * tests)
    least = min(1.0, (wilcoxon(np.arange(1.0, pairs + 1)) or 0) * tests)
    assert found.least_p == pytest.approx(least)
    assert found.pairs_needed == needed and (least < 0.05) == (pairs >= needed)
