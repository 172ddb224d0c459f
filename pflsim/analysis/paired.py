"""Paired differences between groups: both methods on the same client's test examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pflsim.analysis.groups import Group
from pflsim.analysis.runs import ClientCounts, Run
from pflsim.config.names import nearest
from pflsim.errors import SettingsError
from pflsim.records.summary import Choice

CONFIDENCE = 0.95
RESAMPLES = 9999


@dataclass(frozen=True, slots=True)
class Difference:
    """The accuracy of a group minus that of the reference, over pairs (client, seed).

    Args:
        group: the group.
        pairs: number of pairs; clients without test examples are left out.
        mean: mean difference; None without pairs.
        low: lower end of the bootstrap interval of the mean; None with fewer than two pairs.
        high: upper end of the interval.
        better: number of pairs in which the group is better.
        equal: number of pairs with equal accuracy.
        worse: number of pairs in which the reference is better.
        p: two-sided p-value of Wilcoxon's signed-rank test without the equal pairs; 1 if all pairs are equal.
        p_holm: `p` after Holm's correction for the number of groups.
    """

    group: Group
    pairs: int
    mean: float | None
    low: float | None
    high: float | None
    better: int
    equal: int
    worse: int
    p: float | None
    p_holm: float | None = None

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0 and the corrected p-value is below 0.05."""
        if self.low is None or self.high is None or self.p_holm is None:
            return False
        return (self.low > 0 or self.high < 0) and self.p_holm < 1 - CONFIDENCE


def find_reference(groups: Sequence[Group], name: str | None) -> Group:
    """Return the group with this label or method. The default is Local if present, else the first group.

    Raises:
        SettingsError: no group has this name, or several groups have this method.
    """
    if name is None:
        return next((group for group in groups if group.method == "local"), groups[0])
    found = [group for group in groups if group.label == name] or [group for group in groups if group.method == name]
    if not found:
        raise SettingsError(f"--reference {name}: {nearest(name, [group.label for group in groups])}")
    if len(found) > 1:
        labels = ", ".join(group.label for group in found)
        raise SettingsError(f"--reference {name}: several groups have this method; choose one of: {labels}")
    return found[0]


def differences(groups: Sequence[Group], reference: Group, choice: Choice) -> list[Difference]:
    """Compare every other group with the reference, each at its own chosen round."""
    found = [_difference(group, reference, choice) for group in groups if group is not reference]
    adjusted = iter(holm([d.p for d in found if d.p is not None]))
    return [replace(d, p_holm=None if d.p is None else next(adjusted)) for d in found]


def _difference(group: Group, reference: Group, choice: Choice) -> Difference:
    values = np.array(list(client_differences(group, reference, choice)))
    low, high = interval(values)
    better, worse = int((values > 0).sum()), int((values < 0).sum())
    mean, equal = float(values.mean()) if len(values) else None, len(values) - better - worse
    return Difference(group, len(values), mean, low, high, better, equal, worse, wilcoxon(values))


def client_differences(group: Group, reference: Group, choice: Choice) -> Iterator[float]:
    """Yield the difference in test accuracy for every client and every seed that both groups have."""
    others = {run.seed: run for run in reference.runs}
    for run in group.runs:
        if run.seed in others:
            ours, theirs = _counts(run, choice), _counts(others[run.seed], choice)
            for client in sorted(ours.keys() & theirs.keys()):
                yield (ours[client].correct - theirs[client].correct) / ours[client].total


def _counts(run: Run, choice: Choice) -> dict[int, ClientCounts]:
    line = run.at(choice)
    if line is None:
        return {}
    found, expected = run.counts(line.round), line.accuracy[run.reported].clients
    if len(found) != expected:
        counts = f"per_client.csv has {len(found)} clients in round {line.round}, metrics.jsonl {expected}"
        raise SettingsError(f"{run.folder}: {counts}; one of the files is incomplete")
    return found


def interval(values: np.ndarray) -> tuple[float | None, float | None]:
    """Return the BCa bootstrap interval of the mean, with a fixed random seed; None with fewer than two values."""
    if len(values) < 2:
        return None, None
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    from scipy.stats import bootstrap

    batch = max(1, 10**6 // len(values))
    found = bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, batch=batch, method="BCa", rng=0
    ).confidence_interval
    return float(found.low), float(found.high)


def wilcoxon(values: np.ndarray) -> float | None:
    """Return the two-sided p-value of Wilcoxon's signed-rank test; None without values."""
    from scipy.stats import wilcoxon as test

    different = values[values != 0]
    if len(different) == 0:
        return 1.0 if len(values) else None
    return float(np.asarray(test(different))[1])


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values after Holm's step-down correction, in the order given."""
    order, adjusted = np.argsort(p, kind="stable"), np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(np.minimum(np.arange(len(p), 0, -1) * np.asarray(p)[order], 1.0))
    return adjusted.tolist()
