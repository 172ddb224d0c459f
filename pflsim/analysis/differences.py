"""Differences between groups over pairs (client, seed) and over seeds: intervals, tests, and levels of evidence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pflsim.analysis.groups import Group
from pflsim.analysis.runs import Run
from pflsim.errors import SettingsError
from pflsim.records.evaluation import grouped
from pflsim.records.summary import Choice

if TYPE_CHECKING:
    from pandas import DataFrame

ALPHA = 0.05
"""Intervals have the confidence 1 − ALPHA, and a corrected p-value must be below ALPHA."""
RESAMPLES = 9999

Level = Literal["clear", "on these clients only", "not clear"]
Values = Mapping[int, "DataFrame"]
"""The `client_values` of a group's runs by seed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The primary metric of a group minus that of the reference, over pairs (client, seed) and over seeds.

    If the clients are the same in every seed, each of them is one pair, with its mean over the seeds: its differences
    in several seeds are not independent.

    Args:
        group: the group.
        pairs: number of pairs; clients without test examples, or for which it is undefined, are left out.
        mean: mean difference; None without pairs.
        by_seed: mean difference over the pairs of each seed.
        low: lower end of the bootstrap interval of the mean over pairs; None with fewer than two pairs.
        high: upper end of the interval.
        better: number of pairs in which the group is better.
        equal: number of pairs with equal values.
        worse: number of pairs in which the reference is better.
        p: see `wilcoxon`; None without pairs.
        p_holm: `p` after Holm's correction for the number of groups.
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

    @property
    def over_seeds(self) -> tuple[float | None, float | None]:
        """The t interval of the mean over seeds (n − 1 degrees of freedom); None with fewer than two seeds."""
        n = len(self.by_seed)
        if n < 2:
            return None, None
        from scipy.stats import t

        mean, error = statistics.fmean(self.by_seed), statistics.stdev(self.by_seed) / math.sqrt(n)
        half = float(t.ppf(1 - ALPHA / 2, n - 1)) * error
        return mean - half, mean + half

    @property
    def level(self) -> Level:
        """The evidence for the difference.

        - clear: the interval over seeds and the one over pairs exclude 0, and the corrected p-value is below 0.05;
        - on these clients only: the last two hold, the first does not;
        - not clear: anything else. With one seed, no difference is clear.
        """
        (first, last), low, high, p = self.over_seeds, self.low, self.high, self.p_holm
        if first is None or last is None or low is None or high is None or p is None or p >= ALPHA or low <= 0 <= high:
            return "not clear"
        return "clear" if min(low, first) > 0 or max(high, last) < 0 else "on these clients only"


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of all other groups to a reference, which share one Holm correction.

    Args:
        reference: the group that the others are compared with.
        differences: of the others.
        same_clients: whether the clients are the same in every seed, see `Difference`.
    """

    reference: Group
    differences: tuple[Difference, ...] = ()
    same_clients: bool = False

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
    primary, higher = reference.runs[0].primary, reference.runs[0].higher
    found, several = [], any(len(group.runs) > 1 for group in groups)
    same = several and same_clients(run for group in groups for run in group.runs)
    for group in (group for group in groups if group is not reference):
        seeds = client_differences(values[group.label], values[reference.label], primary)
        pairs = paired(seeds, same)
        above, below = int((pairs > 0).sum()), int((pairs < 0).sum())
        better, worse = (above, below) if higher else (below, above)
        mean, by_seed = float(pairs.mean()) if len(pairs) else None, tuple(float(each.mean()) for each in seeds)
        equal, p = len(pairs) - better - worse, wilcoxon(pairs)
        found.append(Difference(group, len(pairs), mean, by_seed, *interval(pairs), better, equal, worse, p))
    adjusted = iter(holm([d.p for d in found if d.p is not None]))
    return Family(reference, tuple(replace(d, p_holm=None if d.p is None else next(adjusted)) for d in found), same)


def same_clients(runs: Iterable[Run]) -> bool:
    """Return whether the clients of all seeds are the same: they have names, or the partition is fixed."""
    return len({tuple(run.partition.get("names", ())) or run.partition_hash for run in runs}) == 1


def paired(seeds: Sequence[Any], same: bool) -> np.ndarray:
    """Return the differences of all seeds by pair; with the `same` clients in every seed, each client's mean."""
    if same and len(seeds) > 1:
        from pandas import concat

        means: Any = concat(seeds).groupby(level=0).mean()
        return means.to_numpy(float).round(12)
    return np.concatenate([[], *(each.to_numpy(float) for each in seeds)])


def client_differences(ours: Values, theirs: Values, primary: str) -> list[Any]:
    """Return the difference in the primary metric for every client of each seed that both have."""
    found: list[Any] = [(ours[seed][primary] - theirs[seed][primary]).dropna() for seed in ours if seed in theirs]
    return [each.astype(float).round(12) for each in found if len(each)]  # 0.3 − 0.2 and 0.2 − 0.1 are equal


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


def interval(values: np.ndarray) -> tuple[float | None, float | None]:
    """Return the BCa bootstrap interval of the mean, with a fixed random seed; None with fewer than two values."""
    if len(values) < 2:
        return None, None
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    from scipy.stats import bootstrap

    batch = max(1, 10**6 // len(values))
    found = bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, confidence_level=1 - ALPHA, batch=batch, method="BCa", rng=0
    ).confidence_interval
    return float(found.low), float(found.high)


def wilcoxon(values: np.ndarray) -> float | None:
    """Return the two-sided p-value of Wilcoxon's signed-rank test without the zeros; None without values.

    It is 1 if all values are zero, or if the ranks point against the mean: then the test does not support its sign.
    """
    from scipy.stats import wilcoxon as test

    different = values[values != 0]
    if len(different) == 0:
        return 1.0 if len(values) else None
    side = "greater" if values.mean() > 0 else "less"
    return min(1.0, 2 * float(np.asarray(test(different, alternative=side))[1]))


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values after Holm's step-down correction, in the order given."""
    order, adjusted = np.argsort(p, kind="stable"), np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(np.minimum(np.arange(len(p), 0, -1) * np.asarray(p)[order], 1.0))
    return adjusted.tolist()
