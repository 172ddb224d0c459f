"""Differences client by client: both methods on the same test examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pflsim.analysis.results import ClientCounts, Group, Run
from pflsim.config.names import nearest
from pflsim.errors import SettingsError
from pflsim.run_folder.summary import Choice

CONFIDENCE = 0.95
RESAMPLES = 9999


@dataclass(frozen=True, slots=True)
class Difference:
    """A group's accuracy less the reference's, over pairs (client, seed).

    Args:
        group: the group.
        pairs: how many pairs there are; a client without test examples makes none.
        mean: mean difference; None without pairs.
        low: lower end of the bootstrap interval of the mean; None with fewer than two pairs.
        high: its upper end.
        better: pairs in which the group is better.
        equal: pairs in which both get as many right.
        worse: pairs in which the reference is better.
        p: of Wilcoxon's signed-rank test, two-sided, pairs without a difference left out; 1 where no other is left.
        p_holm: the same by Holm's correction for the number of groups compared.
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
    p_holm: float | None


def find_reference(groups: Sequence[Group], asked: str | None) -> Group:
    """The group that the others are held against: the one asked for, else Local, else the first.

    Raises:
        SettingsError: there is no such label, and not one group of a method of that name.
    """
    if asked is None:
        return next((group for group in groups if group.method == "local"), groups[0])
    found = [group for group in groups if group.label == asked]
    found = found or [group for group in groups if group.method == asked]
    if len(found) == 1:
        return found[0]
    if found:
        raise SettingsError(f"--reference {asked} is one of several: {', '.join(group.label for group in found)}")
    raise SettingsError(f"--reference {asked}: {nearest(asked, [group.label for group in groups])}")


def differences(groups: Sequence[Group], reference: Group, choice: Choice) -> list[Difference]:
    """Hold every other group against the reference, each at its own round."""
    found = [_difference(group, reference, choice) for group in groups if group is not reference]
    tested = [d.p for d in found if d.p is not None]
    adjusted = iter(holm(tested))
    return [replace(d, p_holm=None if d.p is None else next(adjusted)) for d in found]


def _difference(group: Group, reference: Group, choice: Choice) -> Difference:
    values = np.array(list(client_differences(group, reference, choice)))
    low, high = interval(values)
    better, worse = int((values > 0).sum()), int((values < 0).sum())
    return Difference(
        group=group,
        pairs=len(values),
        mean=float(values.mean()) if len(values) else None,
        low=low,
        high=high,
        better=better,
        equal=len(values) - better - worse,
        worse=worse,
        p=wilcoxon(values),
        p_holm=None,
    )


def client_differences(group: Group, reference: Group, choice: Choice) -> Iterator[float]:
    """Test accuracy of the group less that of the reference, of every client in every seed that both have.

    A seed whose partitions differ is left out: what has the same number there is not the same client.
    """
    others = {run.seed: run for run in reference.runs}
    for run in group.runs:
        other = others.get(run.seed)
        if other is None or other.partition_hash != run.partition_hash:
            continue
        ours, theirs = _counts(run, choice), _counts(other, choice)
        for client in sorted(ours.keys() & theirs.keys()):
            yield (ours[client].correct - theirs[client].correct) / ours[client].total


def _counts(run: Run, choice: Choice) -> dict[int, ClientCounts]:
    line = run.at(choice)
    if line is None:
        return {}
    found, expected = run.counts(line.round), line.accuracy[run.reported].clients
    if len(found) != expected:
        raise SettingsError(
            f"{run.folder}: per_client.csv has {len(found)} clients in round {line.round}, metrics.jsonl {expected}"
        )
    return found


def interval(values: np.ndarray) -> tuple[float | None, float | None]:
    """A bootstrap interval (BCa) of the mean; the same one in every repetition."""
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
    """Wilcoxon's signed-rank test: p, two-sided; None without pairs."""
    if len(values) == 0:
        return None
    different = values[values != 0]
    if len(different) == 0:
        return 1.0
    from scipy.stats import wilcoxon as test

    return float(np.asarray(test(different))[1])


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction, in the order given."""
    adjusted, highest = [0.0] * len(p), 0.0
    for rank, place in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        highest = max(highest, min(1.0, (len(p) - rank) * p[place]))
        adjusted[place] = highest
    return adjusted
