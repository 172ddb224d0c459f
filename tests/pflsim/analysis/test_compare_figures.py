"""The figures of a comparison, against numpy on the counts they come from."""

from pathlib import Path

import numpy as np
import pytest
from made_runs import made, make_run
from scipy import stats

from pflsim.analysis.charts import curve
from pflsim.analysis.comparison import Comparison, Spread, compare
from pflsim.analysis.groups import group_runs
from pflsim.analysis.runs import Run, read_run
from pflsim.analysis.tables import records, render
from pflsim.errors import SettingsError

CLIENTS, ROUNDS, SEEDS = 12, 4, (0, 1, 2)
TOTALS = np.array([10, 7, 5, 13, 10, 10, 8, 9, 20, 3, 6, 0])
"""The last client has no test example."""


def counts(method: int, seed: int, split: int) -> np.ndarray:
    """Right answers, [round, client]; methods get better in time, some more than others."""
    rng = np.random.default_rng((method, seed, split))
    chance = np.linspace(0.3, 0.6 + 0.15 * method, ROUNDS)[:, None]
    return rng.binomial(TOTALS, np.broadcast_to(chance, (ROUNDS, CLIENTS)))


def rates(right: np.ndarray) -> np.ndarray:
    return right[:, :-1] / TOTALS[:-1]


METHODS = {"local": 0, "fedavg": 1, "ditto": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, three seeds."""
    root = tmp_path_factory.mktemp("runs")
    for method, number in METHODS.items():
        for seed in SEEDS:
            test, val = (
                [list(zip(row, TOTALS.tolist(), strict=True)) for row in counts(number, seed, split).tolist()]
                for split in (0, 1)
            )
            make_run(
                root / f"{method}{seed}", test, val=val, method=method, seed=seed, up=10 * number, down=20 * number,
                seconds=1.0 + seed,
            )  # fmt: skip
    return root


def compared(folder: Path, *patterns: str, **settings: object) -> Comparison:
    runs = [read_run(path) for pattern in patterns or ("*",) for path in sorted(folder.glob(pattern))]
    groups = sorted(group_runs(runs), key=lambda group: METHODS[group.method])
    return compare(groups, **settings)  # type: ignore[arg-type]


def chosen(method: str, seed: int, choice: str) -> int:
    """The place of the round."""
    split = {"best_val": 1, "best_test_oracle": 0}.get(choice)
    if split is None:
        return ROUNDS - 1
    return int(rates(counts(METHODS[method], seed, split)).mean(axis=1).argmax())


@pytest.mark.parametrize("choice", ["best_val", "last", "best_test_oracle"])
@pytest.mark.slow
def test_figures_over_seeds(folder: Path, choice: str) -> None:
    for row in compared(folder, choice=choice).rows:
        method = row.group.method
        at = [chosen(method, seed, choice) for seed in SEEDS]
        sorted_rates = np.sort(
            [rates(counts(METHODS[method], seed, 0))[place] for seed, place in zip(SEEDS, at, strict=True)], axis=1
        )
        assert row.rounds == tuple(place + 1 for place in at)
        found = [row.figures[name] for name in ("mean", "worst_decile", "best_decile")]
        expected = [sorted_rates.mean(1), sorted_rates[:, :2].mean(1), sorted_rates[:, -2:].mean(1)]  # ⌈11 / 10⌉ = 2
        for spread, values in zip(found, expected, strict=True):
            assert spread.mean == pytest.approx(values.mean(), abs=1e-12)
            assert spread.std == pytest.approx(values.std(ddof=1), abs=1e-12)
        right = np.array([counts(METHODS[method], seed, 0)[place] for seed, place in zip(SEEDS, at, strict=True)])
        assert row.figures["weighted_mean"].values == pytest.approx(right.sum(axis=1) / TOTALS.sum(), abs=1e-12)
        a_round = 30 * METHODS[method] * CLIENTS
        assert row.figures["bytes_until_round"].values == tuple(a_round * (place + 1) for place in at)
        assert row.figures["bytes_total"] == Spread((a_round * ROUNDS,) * 3)


def test_the_round_is_chosen_by_validation_where_all_have_it(folder: Path, tmp_path: Path) -> None:
    assert compared(folder).choice == "best_val"
    without = made(tmp_path / "w", [[(1, 2)]], method="fedavg")
    assert compare(group_runs([without])).choice == "last"
    with_it = made(tmp_path / "v", [[(1, 2)]], val=[[(1, 2)]], method="local")
    assert compare(group_runs([with_it, without])).choice == "last"
    with pytest.raises(SettingsError, match="--at best_val: .* --at last"):
        compare(group_runs([without]), choice="best_val")


@pytest.mark.slow
def test_rounds_and_bytes_to_a_target(folder: Path) -> None:
    target = 0.6
    for row in compared(folder, target=target).rows:
        method = METHODS[row.group.method]
        reaching = [rates(counts(method, seed, 0)).mean(axis=1) >= target for seed in SEEDS]
        first = [int(reached.argmax()) + 1 for reached in reaching if reached.any()]
        assert row.reached == len(first)
        if len(first) < len(SEEDS):
            assert "rounds_to_target" not in row.figures and "bytes_to_target" not in row.figures
        else:
            assert row.figures["rounds_to_target"] == Spread(tuple(first))
            assert row.figures["bytes_to_target"] == Spread(tuple(30 * method * CLIENTS * n for n in first))


@pytest.mark.parametrize(("right", "target"), [(29, 0.29), (57, 0.57), (58, 0.58), (100, 1.0), (0, 0.0)])
def test_a_target_of_whole_hundredths_is_reached(tmp_path: Path, right: int, target: float) -> None:
    """Rounding down must not lose a hundredth to the floating point: 0.29 · 100 is 28.999…"""
    comparison = compare(group_runs([made(tmp_path / "r", [[(right, 100)]])]))
    assert comparison.target and comparison.target.goals == {0: target}
    assert comparison.rows[0].figures["rounds_to_target"] == Spread((1,))


def test_runs_that_are_never_evaluated(tmp_path: Path) -> None:
    groups = group_runs([made(tmp_path / "r", [[(0, 0)]]), made(tmp_path / "s", [[(0, 0)]], method="local")])
    comparison = compare(groups)
    assert comparison.target is None
    assert "mean" not in comparison.rows[0].figures and comparison.rows[0].rounds == ()
    (difference,) = comparison.differences
    assert (difference.pairs, difference.mean, difference.low, difference.p, difference.p_holm) == (0,) + (None,) * 4


# Differences ----------------------------------------------------------------------------------------------------------


def test_differences_client_by_client(folder: Path) -> None:
    comparison = compared(folder)
    assert comparison.reference.label == "Local"
    against_local, against_fedavg = comparison.families
    assert comparison.differences == against_local.differences
    assert [d.group.label for d in against_fedavg.differences] == ["Local", "Ditto"]
    ditto = records(comparison)[2]
    assert (ditto["reference"], ditto["fedavg_reference"]) == ("local", "fedavg")
    test, prior = against_local.differences[1].seeds, against_local.prior
    assert test and prior and ditto["p_holm_over_seeds"] == test.p_holm >= test.p == ditto["p_over_seeds"]
    assert (ditto["error_over_seeds"], ditto["df_over_seeds"]) == (test.error, test.df)
    assert (ditto["prior_variance"], ditto["prior_df"]) == prior and records(comparison)[0]["prior_df"] is None
    assert ditto["fedavg_p_holm"] == against_fedavg.differences[1].p_holm != ditto["p_holm"]
    tested = []
    for difference in comparison.differences:
        pairs = []
        for seed in SEEDS:
            ours, theirs = (
                rates(counts(METHODS[m], seed, 0))[chosen(m, seed, "best_val")]
                for m in (difference.group.method, "local")
            )
            pairs.append(ours - theirs)
        values = np.concatenate(pairs).round(12)
        means = np.array([each.mean() for each in pairs])
        assert (test := difference.seeds) and test.df == 4  # the variances are so alike that they count as one
        half = 2.776445 * test.error
        assert difference.by_seed == pytest.approx(means, abs=1e-11)
        assert difference.over_seeds == pytest.approx((means.mean() - half, means.mean() + half), abs=1e-6)
        assert difference.pairs == len(values) == 33  # without the client that has no test examples
        assert difference.mean == pytest.approx(values.mean(), abs=1e-9)
        assert (difference.better, difference.equal, difference.worse) == (
            (values > 0).sum(), (values == 0).sum(), (values < 0).sum(),
        )  # fmt: skip
        assert difference.p == pytest.approx(stats.wilcoxon(values, zero_method="wilcox").pvalue)
        resampled = np.random.default_rng(5).choice(values, (20_000, len(values))).mean(axis=1)
        assert [difference.low, difference.high] == pytest.approx(np.quantile(resampled, [0.025, 0.975]), abs=0.015)
        tested.append(difference.p)
    assert [d.p_holm for d in comparison.differences] == pytest.approx(
        [min(1, 2 * p) if p == min(tested) else max(tested[0], tested[1], 2 * min(tested)) for p in tested]
    )


def test_only_pairs_of_the_same_client_count(tmp_path: Path) -> None:
    """A seed that only one of them has makes no pair, and different partitions have no differences."""
    local = [made(tmp_path / f"l{s}", [[(5, 10)]], method="local", seed=s) for s in (0, 1, 2)]
    other = [made(tmp_path / "a0", [[(9, 10)]], seed=0), made(tmp_path / "a3", [[(1, 10)]], seed=3)]
    conflict = made(tmp_path / "a1", [[(7, 10)]], seed=1, digest="f" * 64)
    assert compare(group_runs([*local, *other, conflict])).differences == ()
    (difference,) = compare(group_runs([*local, *other])).differences
    assert difference.pairs == 1 and difference.mean == pytest.approx(0.4)
    assert (difference.low, difference.high, difference.p) == (None, None, 1.0)


def test_clients_that_are_the_same_in_every_seed_count_once(tmp_path: Path) -> None:
    """Otherwise 12 pairs of 4 clients would show a difference that more clients need not have."""
    effects, runs = [3, -1, 2, 2], []
    for seed in range(3):
        for method, extra in (("local", [0] * 4), ("ditto", effects)):
            right = [(500 + 50 * effect + seed * (method == "ditto"), 1000) for effect in extra]
            runs.append(made(tmp_path / f"{method}-{seed}", [right], method=method, seed=seed, digest="f" * 64))
    comparison = compare(group_runs(runs))
    (difference,) = comparison.differences
    values = np.array(effects) * 0.05 + 0.001
    assert comparison.families[0].same_clients and difference.mean == pytest.approx(values.mean())
    assert (difference.pairs, difference.better, difference.worse, difference.level) == (4, 3, 1, "not clear")
    assert difference.p == pytest.approx(stats.wilcoxon(values).pvalue)


def test_the_reference(folder: Path, tmp_path: Path) -> None:
    assert compared(folder, "fedavg*", "ditto*").reference.label == "FedAvg"
    assert compare(compared(folder).groups[::-1]).reference.label == "Local"
    with pytest.raises(SettingsError, match="--reference fedavgg: did you mean fedavg"):
        compared(folder, reference="fedavgg")
    two = group_runs([made(tmp_path / f"{lr}", [[(1, 2)]], lr=lr) for lr in (0.1, 0.2)])
    with pytest.raises(SettingsError, match="--reference fedavg: .*: fedavg lr=0.1, fedavg lr=0.2"):
        compare(two, reference="fedavg")
    assert compare(two, reference="fedavg lr=0.2").reference is two[1]
    assert compare(two, reference="FedAvg lr=0.2").reference is two[1]
    assert [compare(two[:1], reference=name).reference for name in ("fedavg", "FedAvg")] == two[:1] * 2


# Curves ---------------------------------------------------------------------------------------------------------------


def test_curves_over_seeds(folder: Path) -> None:
    (row,) = compared(folder, "ditto*").rows
    y = np.array([rates(counts(2, seed, 0)).mean(axis=1) for seed in SEEDS])
    found = curve(row.group)
    assert found is not None
    np.testing.assert_allclose(found[1:], [y.mean(0), y.min(0), y.max(0)])
    for against, x in (
        ("rounds", [1, 2, 3, 4]), ("bytes", [60 * CLIENTS * n for n in (1, 2, 3, 4)]), ("seconds", [2, 4, 6, 8])
    ):  # fmt: skip
        found = curve(row.group, against)
        assert found is not None
        np.testing.assert_allclose(found.x, x)


def test_a_curve_has_the_evaluated_rounds_that_all_seeds_have(tmp_path: Path) -> None:
    long = made(tmp_path / "a", [[(1, 10)], [(2, 10)], [(3, 10)]], every=2, rounds=6)
    short = made(tmp_path / "b", [[(2, 10)], [(4, 10)]], every=2, rounds=6, seed=1, complete=False)
    (group,) = group_runs([long, short])
    found = curve(group, "bytes")
    assert found and [*found.mean] == pytest.approx([0.15, 0.3]) and [*found.x] == pytest.approx([60, 120])


# Equal and nearly equal methods ---------------------------------------------------------------------------------------


def seeds_of(folder: Path, method: str, rights: list[list[int]], **settings: object) -> list[Run]:
    """A run of each seed."""
    return [
        made(folder / f"{method}{seed}", [[(right, 100) for right in own]], method=method, seed=seed, **settings)
        for seed, own in enumerate(rights)
    ]


def test_equal_values_on_every_client_and_seed(tmp_path: Path) -> None:
    base, other = [[50, 60, 70], [55, 65, 75]], [[50, 60, 70], [55, 65, 74]]
    rights = {"local": base, "a": other, "b": base, "c": other, "d": [[70, 60, 50], base[1]]}
    found = compare(group_runs([run for name, own in rights.items() for run in seeds_of(tmp_path, name, own)]))
    assert found.identical == (("Local", "b"), ("a", "c"))
    assert [record["identical_to"] for record in records(found)] == ["b", "c", "local", "a", ""]
    assert "every seed: Local and b\n" in render([found], "text")


def test_what_cannot_be_told_apart_from_the_best(tmp_path: Path) -> None:
    """Three clients of 24 show nothing (p = 1/4), all 24 do; what comes after the first clear one does not count."""
    base = np.random.default_rng(0).integers(40, 50, 24)
    below = {"best": [0] * 24, "level": [1] * 3 + [0] * 21, "next": [1] * 24, "noisy": [-24, 23, -20, 27] * 6}
    methods = {"local": base, **{name: base + 20 - np.array(points) for name, points in below.items()}}
    found = compare(group_runs([r for name, own in methods.items() for r in seeds_of(tmp_path, name, [own.tolist()])]))
    assert found.tied == ("best", "level")
