"""Differences between groups: one estimand, tests over clients and over seeds, and levels of evidence.

docs/statistics.md has the definitions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pflsim.analysis.groups import Group
from pflsim.analysis.intervals import ALPHA
from pflsim.analysis.runs import Run
from pflsim.display.formats import Choice
from pflsim.errors import SettingsError
from pflsim.records.evaluation import grouped

if TYPE_CHECKING:
    from pandas import DataFrame

RESAMPLES = 9999

Level = Literal["clear", "on these clients only", "not clear"]
Values = Mapping[int, "DataFrame"]
"""The `client_values` of a group's runs by seed."""


@dataclass(frozen=True, slots=True)
class SeedTest:
    """The test over seeds of a difference; see `moderated` and `two_way`.

    Args:
        clients: number of clients that are defined in all seeds; None: clients are others in every seed.
        mean: the mean that is tested; that of the difference, unless some client lacks a seed.
        error: its standard error.
        df: degrees of freedom.
        p_holm: `p` after Holm's correction for the number of groups.
    """

    clients: int | None
    mean: float
    error: float
    df: float
    p_holm: float = 1.0

    @property
    def p(self) -> float:
        """The two-sided p-value; 1 if mean and error are 0."""
        from scipy.stats import t

        ratio = abs(self.mean) / self.error if self.error else math.inf if self.mean else 0.0
        return 2 * float(t.sf(ratio, self.df))

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the mean."""
        from scipy.stats import t

        half = float(t.ppf(1 - ALPHA / 2, self.df)) * self.error
        return self.mean - half, self.mean + half


@dataclass(frozen=True, slots=True)
class Difference:
    """The primary metric of a group minus that of the reference.

    A pair is a client of a seed; if the clients are the same in every seed, a client with its mean over the seeds.

    Args:
        group: the group.
        pairs: number of pairs; clients without test examples, or for which it is undefined, are left out.
        mean: mean over seeds of the seed's mean over clients; None without pairs.
        by_seed: mean over the clients of each seed.
        low: lower end of the bootstrap `interval` over clients; None with fewer than two in every seed.
        high: upper end of the interval.
        better: number of pairs in which the group is better.
        equal: number of pairs with equal values.
        worse: number of pairs in which the reference is better.
        p: see `wilcoxon`; None without pairs.
        p_holm: `p` after Holm's correction for the number of groups.
        seeds: the test over seeds; None with fewer than two seeds, or two clients that are defined in all of them.
        unmatched: number of clients of all seeds for which only one of the two is defined.
    """

    group: Group
    pairs: int
    mean: float | None
    by_seed: tuple[float, ...]
    low: float | None
    high: float | None
    better: int
    equal: int
    worse: int
    p: float | None
    p_holm: float | None = None
    seeds: SeedTest | None = None
    unmatched: int = 0

    @property
    def over_seeds(self) -> tuple[float | None, float | None]:
        """The interval of the test over seeds; None without a test."""
        return self.seeds.interval if self.seeds else (None, None)

    @property
    def level(self) -> Level:
        """The evidence for the difference.

        - clear: both tests have a corrected p-value below 0.05, the interval over clients excludes 0, and the means
          of both have the same sign;
        - on these clients only: the test and the interval over clients hold, the test over seeds does not;
        - not clear: anything else. With one seed, no difference is clear.
        """
        mean, seeds, low, high, p = self.mean, self.seeds, self.low, self.high, self.p_holm
        if mean is None or seeds is None or low is None or high is None or p is None or p >= ALPHA:
            return "not clear"
        if not (low > 0 if mean > 0 else high < 0):
            return "not clear"
        return "clear" if seeds.p_holm < ALPHA and seeds.mean * mean > 0 else "on these clients only"


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of all other groups to a reference, which share one Holm correction for each test.

    Args:
        reference: the group that the others are compared with.
        differences: of the others.
        same_clients: whether the clients are the same in every seed, see `Difference`.
        prior: see `moderated`; None: there is none.
    """

    reference: Group
    differences: tuple[Difference, ...] = ()
    same_clients: bool = False
    prior: tuple[float, float] | None = None

    @property
    def metric(self) -> str:
        """The metric that is compared."""
        return self.reference.runs[0].primary

    @property
    def higher(self) -> bool:
        """Whether a higher value of it is better."""
        return self.reference.runs[0].higher

    def gains(self, difference: Difference) -> bool:
        """Return whether the group's mean is better than that of the reference."""
        return difference.mean is not None and (difference.mean > 0) == self.higher

    @property
    def unit(self) -> str:
        """What a pair is."""
        return "clients" if self.same_clients else "pairs (client, seed)"

    @property
    def tests(self) -> int:
        """The number of p-values."""
        return sum(d.p is not None for d in self.differences)

    @property
    def least_p(self) -> float:
        """The smallest corrected p-value that any results on so many pairs can have: 2 · 2⁻ⁿ · tests, at most 1."""
        return min(1.0, 2.0 ** (1 - max(d.pairs for d in self.differences)) * self.tests)

    @property
    def pairs_needed(self) -> int:
        """The least number of pairs for which `least_p` is below 0.05."""
        return 1 + math.ceil(math.log2(self.tests / ALPHA))


def family(groups: Sequence[Group], reference: Group, values: Mapping[str, Values]) -> Family:
    """Compare every other group with the reference.

    Args:
        groups: the groups.
        reference: one of them.
        values: of every group, by label.
    """
    primary, several = reference.runs[0].primary, any(len(group.runs) > 1 for group in groups)
    same = several and same_clients(run for group in groups for run in group.runs)
    others = [group for group in groups if group is not reference]
    each = [client_differences(values[group.label], values[reference.label], primary) for group in others]
    tests, prior = ([two_way(table) for table, _ in each], None) if same else moderated([table for table, _ in each])
    found = []
    for group, test, (table, unmatched) in zip(others, tests, each, strict=True):
        pairs, by_seed = paired(table, same), tuple(np.nanmean(table, 1).tolist())
        mean = statistics.fmean(by_seed) if by_seed else None
        above, below = int((pairs > 0).sum()), int((pairs < 0).sum())
        better, worse = (above, below) if reference.runs[0].higher else (below, above)
        counts, p = (better, len(pairs) - better - worse, worse), wilcoxon(pairs, mean)
        ends = interval(table, same)
        found.append(Difference(group, len(pairs), mean, by_seed, *ends, *counts, p, None, test, unmatched))
    corrected = zip(found, holm([d.p for d in found]), holm([d.seeds and d.seeds.p for d in found]), strict=True)
    found = [replace(d, p_holm=p, seeds=d.seeds and replace(d.seeds, p_holm=q)) for d, p, q in corrected]
    return Family(reference, tuple(found), same, prior)


def same_clients(runs: Iterable[Run]) -> bool:
    """Return whether the clients of all seeds are the same: they have names, or the partition is fixed."""
    return len({tuple(run.partition.get("names", ())) or run.partition_hash for run in runs}) == 1


def client_differences(ours: Values, theirs: Values, primary: str) -> tuple[np.ndarray, int]:
    """Return the differences in the primary metric, and the number of values that only one of the two has.

    The differences are [seeds, clients], NaN where one of the two is not finite, without seeds and clients of which
    all are.
    """
    from pandas import DataFrame

    own, base = (
        DataFrame({seed: values[seed][primary].astype(float) for seed in ours if seed in theirs}).where(np.isfinite)
        for values in (ours, theirs)
    )
    both = (own - base).round(12)  # 0.3 − 0.2 and 0.2 − 0.1 are equal
    alone = own.count().sum() + base.count().sum() - 2 * both.count().sum()
    return both.dropna(how="all").dropna(axis=1, how="all").to_numpy(float).T, int(alone)


def paired(table: np.ndarray, same: bool) -> np.ndarray:
    """Return the differences of all pairs; with the `same` clients in every seed, each client's mean."""
    return np.nanmean(table, 0).round(12) if same else table[~np.isnan(table)]


def moderated(tables: Sequence[np.ndarray]) -> tuple[list[SeedTest | None], tuple[float, float] | None]:
    """Return moderated t tests of the means of seeds with other clients each, before Holm's correction (Smyth 2004).

    s̃² = (d₀ s₀² + (S − 1) s²) / (d₀ + S − 1) with S − 1 + d₀ degrees of freedom, at most the sum of S − 1 over groups.

    Returns:
        The tests, None with fewer than two seeds; and the `prior` (s₀², d₀) of the variances s², None with fewer than
        two positive ones: then s̃² = s².

    Args:
        tables: [S, K] of each group, see `client_differences`.
    """
    each = [np.nanmean(table, 1).round(12) for table in tables]
    own = [(seeds.var(ddof=1), len(seeds) - 1) for seeds in each if len(seeds) > 1]
    known = np.array([(variance, df) for variance, df in own if variance > 0])
    found = prior(*known.T) if len(known) > 1 else None
    s0, d0 = found or (0.0, 0.0)

    def test(seeds: np.ndarray) -> SeedTest | None:
        if (df := len(seeds) - 1) < 1:
            return None
        s2 = s0 if math.isinf(d0) else (d0 * s0 + df * seeds.var(ddof=1)) / (d0 + df)
        return SeedTest(None, float(seeds.mean()), math.sqrt(s2 / len(seeds)), min(d0 + df, sum(n for _, n in own)))

    return [test(seeds) for seeds in each], found


def prior(variances: np.ndarray, df: np.ndarray) -> tuple[float, float]:
    """Return the prior variance s₀² and its degrees of freedom d₀ of variances with df degrees each (Smyth 2004, 6.2).

    Logarithms are cut at their 5% and 95% quantiles, so that one group that diverged does not set the prior.
    """
    from scipy.optimize import brentq
    from scipy.special import digamma, polygamma

    logs = np.log(variances)
    e = np.clip(logs, *np.quantile(logs, (0.05, 0.95))) - digamma(df / 2) + np.log(df / 2)
    excess = float(e.var(ddof=1) - polygamma(1, df / 2).mean())
    if excess < 1e-9:
        return float(np.exp(e.mean())), math.inf
    half: Any = brentq(lambda y: polygamma(1, y) - excess, 1 / excess, 1 / excess + 0.5)  # 1/y < ψ′(y) < 1/(y − 1/2)
    return float(np.exp(e.mean() + digamma(half) - np.log(half))), 2 * half


def two_way(table: np.ndarray) -> SeedTest | None:
    """Return the test of a mean over the same clients in every seed, both random, before Holm's correction.

    The variance is max(MS_client + MS_seed − MS_rest, MS_client, MS_seed) / (S K), with Satterthwaite's degrees of
    freedom, over the K clients that are defined in all S seeds.

    Args:
        table: [S, K'], see `client_differences`.
    """
    d = table[:, ~np.isnan(table).any(0)]
    seeds, clients = d.shape
    if min(d.shape) < 2:
        return None
    rest = d - d.mean(0) - d.mean(1, keepdims=True) + d.mean()
    squares = clients * d.mean(1).var(ddof=1), seeds * d.mean(0).var(ddof=1), (rest**2).sum()
    freedom = np.array([seeds - 1, clients - 1, (seeds - 1) * (clients - 1)])
    by_seed, by_client, left = each = np.array(squares) / [1, 1, freedom[2]]
    total, spread = max(by_client + by_seed - left, by_client, by_seed), (each**2 / freedom).sum()
    df = total**2 / spread if spread else seeds - 1.0
    return SeedTest(clients, float(d.mean()), math.sqrt(total / d.size), float(df))


def client_values(run: Run, choice: Choice) -> DataFrame:
    """Return the reported model's test results by client, in the chosen round."""
    line = run.at(choice)
    if line is None:
        return run.counts(-1)
    found, expected = run.counts(line.round), line.evaluations[run.reported].clients
    if len(found) != expected:
        counts = f"per_client.csv has {len(found)} clients in round {line.round}, metrics.jsonl {expected}"
        raise SettingsError(f"{run.folder}: {counts}; one of the files is incomplete")
    return found


def values_of(groups: Iterable[Group], choice: Choice) -> dict[str, dict[int, DataFrame]]:
    """Return the `client_values` of every run, by label and seed."""
    return {group.label: {run.seed: client_values(run, choice) for run in group.runs} for group in groups}


def identical(values: Mapping[str, Values], primary: str) -> tuple[tuple[str, ...], ...]:
    """Return the labels of groups with equal values of the primary metric on every client in every seed."""
    texts = {label: [own[seed][primary].dropna().to_csv() for seed in own] for label, own in values.items()}
    found = grouped(((*own, *texts[label]), label) for label, own in values.items() if all(map(len, own.values())))
    return tuple(tuple(labels) for labels in found.values() if len(labels) > 1)


def interval(table: np.ndarray, same: bool) -> tuple[float | None, float | None]:
    """Return the BCa bootstrap interval of the mean over seeds of the means over clients, with a fixed random seed.

    Clients are resampled within each seed; if they are the `same` in every seed, with all their seeds.

    Args:
        table: see `client_differences`.
        same: whether the clients are the same in every seed.

    Returns:
        Its ends; None with fewer than two clients in every seed, or if BCa has no solution.
    """
    if same:
        seeds = table if np.isnan(table).any() else table.mean(0, keepdims=True)
    else:  # one client alone stays what it is
        seeds = [np.repeat(own, 1 + (len(own) == 1)) for own in (row[~np.isnan(row)] for row in table)]
    if table.size == 0 or (~np.isnan(table)).sum(1).max() < 2:
        return None, None

    def mean(*seeds: np.ndarray, axis: int = -1) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # a seed may have none of the drawn clients
            each = np.stack([s.sum(axis, where=~np.isnan(s)) / (~np.isnan(s)).sum(axis) for s in seeds])
        return np.nanmean(each, 0)

    if not any(np.nanmax(own) - np.nanmin(own) for own in seeds):
        return float(mean(*seeds)), float(mean(*seeds))
    from scipy.stats import bootstrap

    options = {"n_resamples": RESAMPLES, "confidence_level": 1 - ALPHA, "batch": max(1, 10**6 // table.size)}
    found = bootstrap(tuple(seeds), mean, paired=same, method="BCa", rng=0, **options).confidence_interval
    return (float(found.low), float(found.high)) if found.low <= found.high else (None, None)


def wilcoxon(values: np.ndarray, mean: float | None = None) -> float | None:
    """Return the two-sided p-value of Wilcoxon's signed-rank test without the zeros; None without values.

    It is 1 if all values are zero, or if the ranks point against the mean: then the test does not support its sign.

    Args:
        values: the differences.
        mean: the printed difference; None: the mean of the values.
    """
    from scipy.stats import rankdata
    from scipy.stats import wilcoxon as test

    different = values[values != 0]
    if len(different) == 0:
        return 1.0 if len(values) else None
    above = (values.mean() if mean is None else mean) > 0
    if len(different) <= 13:  # exact also with ties, as scipy does it, which takes a second
        ranks, towards = rankdata(abs(different)), different > 0 if above else different < 0
        signs = np.indices((2,) * len(ranks)).reshape(len(ranks), -1)
        return min(1.0, 2 * float((ranks @ signs >= ranks @ towards).mean()))
    return min(1.0, 2 * float(np.asarray(test(different, alternative="greater" if above else "less"))[1]))


def holm(p: Sequence[float | None]) -> list[Any]:
    """Return p-values after Holm's step-down correction, in the order given; None stays, and does not count."""
    known = np.array([each for each in p if each is not None])
    order, adjusted = np.argsort(known, kind="stable"), np.empty(len(known))
    adjusted[order] = np.maximum.accumulate(np.minimum(np.arange(len(known), 0, -1) * known[order], 1.0))
    rest = iter(adjusted.tolist())
    return [None if each is None else next(rest) for each in p]
