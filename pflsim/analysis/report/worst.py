"""Whether one group serves its worst clients better than another: a paired bootstrap of the worst decile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pflsim.analysis.results.groups import Group
from pflsim.run_folder.summary import Choice

RESAMPLES = 4000
CONFIDENCE = 0.95
AT_ONCE = 2_000_000
"""Rates drawn at a time."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A figure of one group less that of another, mean over the seeds they share, its interval, p of a test, and
    whether there are clients enough for the interval to be believed.
    """

    mean: float
    low: float
    high: float
    p: float | None = None
    enough: bool = True

    @property
    def clear(self) -> bool:
        """Whether the first group is better beyond doubt: the interval is above 0, and the test says so too."""
        return self.enough and self.low > 0 and (self.p is None or self.p < 1 - CONFIDENCE)


def clients_needed(comparisons: int) -> int:
    """How many clients it takes to show a difference at all.

    Drawing again from fewer, of which all happen to do better, never gives anything but an interval above 0, though n
    clients all do so by chance with probability 2 · 2⁻ⁿ: that must be less than the error of one comparison.
    """
    return 1 + math.ceil(math.log2(comparisons / (1 - CONFIDENCE)))


def worst_gap(group: Group, other: Group, choice: Choice, comparisons: int = 1) -> Gap | None:
    """Compare the worst tenths; None where no seed has the same clients in both, or none has two of them.

    In every seed clients are drawn with replacement, the same ones for both groups, and each group's worst decile is
    taken among those drawn. The interval (percentiles) says what other clients of the kind would have made of it, not
    what other seeds would have. Of several comparisons each gets its share of the error (Bonferroni).
    """
    pairs = [rates for rates in _pairs(group, other, choice) if rates.shape[1] > 1]
    if not pairs:
        return None
    drawn = np.mean([_drawn(rates, np.random.default_rng(n)) for n, rates in enumerate(pairs)], axis=0)
    tail = (1 - CONFIDENCE) / 2 / comparisons
    low, high = np.quantile(drawn, [tail, 1 - tail])
    enough = sum(rates.shape[1] for rates in pairs) >= clients_needed(comparisons)
    return Gap(float(np.mean([_gap(rates) for rates in pairs])), float(low), float(high), enough=enough)


def worst_decile(rates: np.ndarray) -> np.ndarray:
    """Mean of the ⌈n/10⌉ lowest of [..., n]."""
    tenth = math.ceil(rates.shape[-1] / 10)
    return np.partition(rates, tenth - 1, axis=-1)[..., :tenth].mean(-1)


def _gap(rates: np.ndarray) -> np.ndarray:
    return worst_decile(rates[0]) - worst_decile(rates[1])


def _drawn(rates: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The gap in every resample of [2, n] rates."""
    clients = rates.shape[1]
    found, left = [], RESAMPLES
    while left > 0:
        count = min(left, max(1, AT_ONCE // clients))
        picked = generator.integers(clients, size=(count, clients))
        found.append(_gap(rates[:, picked]))
        left -= count
    return np.concatenate(found)


def _pairs(group: Group, other: Group, choice: Choice) -> list[np.ndarray]:
    """[2, n] rates of the clients that both have, for every seed with the same partition in both."""
    others = {run.seed: run for run in other.runs}
    found = []
    for run in group.runs:
        peer = others.get(run.seed)
        lines = run.at(choice), peer and peer.at(choice)
        if peer is None or peer.partition_hash != run.partition_hash or lines[0] is None or lines[1] is None:
            continue
        ours, theirs = run.counts(lines[0].round), peer.counts(lines[1].round)
        both = sorted(ours.keys() & theirs.keys())
        found.append(np.array([[side[client].rate for client in both] for side in (ours, theirs)]))
    return found
