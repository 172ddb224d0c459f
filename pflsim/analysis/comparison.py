"""A comparison of groups: their primary metric, traffic and time over seeds, and the differences between them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pflsim.analysis.groups import Group, check_comparable, check_evaluation, group_runs
from pflsim.analysis.runs import Run
from pflsim.config.names import nearest
from pflsim.errors import SettingsError
from pflsim.records.evaluation import Scope
from pflsim.records.history import RoundMetrics, Traffic
from pflsim.records.summary import Choice
from pflsim.types import ModelKind

if TYPE_CHECKING:
    from pandas import DataFrame

STATS = ("mean", "worst_decile", "median", "best_decile", "std")
"""Fields of `pflsim.records.evaluation.Stats`, of the primary metric, among the figures of a row."""
TOLERANCE = 1e-9
"""Rounding error allowed in a mean of rates."""
CONFIDENCE = 0.95
RESAMPLES = 9999


@dataclass(frozen=True, slots=True)
class Spread:
    """One value per seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds (n − 1); None with one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """The figures of a group, for one model and one round of each run.

    Args:
        group: the runs.
        scope: the model, the split, and the phase that the metrics are measured on.
        metrics: the names of the metrics besides the primary one that all runs have.
        reached: number of seeds that reach the target.
        figures: values by name; a figure that a run lacks is left out. The figures are

            - `STATS`, `undefined` and `metrics`: the primary metric over clients, and means over clients;
            - `round`; `up`, `down`, `bytes_until_round`, `seconds`: bytes that all clients sent, received, and both,
              and wall seconds of the rounds, up to that round;
            - `up_total`, `down_total`, `bytes_total`, `seconds_total`: of the whole run, with its start;
            - `rounds_to_target`, `bytes_to_target`: the first evaluated round that reaches the target, and
              the bytes in both directions up to it.
    """

    group: Group
    scope: Scope
    metrics: tuple[str, ...]
    reached: int
    figures: Mapping[str, Spread]

    @property
    def rounds(self) -> tuple[int, ...]:
        """The chosen round of each run, in seed order; empty if a run has no such round."""
        return tuple(map(int, self.figures["round"].values)) if "round" in self.figures else ()


def row(group: Group, choice: Choice, target: float | None = None, model: ModelKind | None = None) -> Row:
    """Return the figures of a group.

    Args:
        group: the runs.
        choice: the round that figures are taken from.
        target: the mean of the primary metric to reach; None: no run reaches it.
        model: the evaluated model; None: the reported model.
    """
    scope = group.runs[0].scope(model)
    found, metrics = list[dict[str, float]](), list[str]()
    for run in group.runs:
        traffic = run.history[-1].traffic_total if run.history else Traffic()
        own = _bytes(traffic, "up_total", "down_total", "bytes_total")
        own["seconds_total"] = max(run.summary["seconds"], sum(line.total_seconds for line in run.history))
        if line := run.at(choice, model):
            found_now = line.evaluations[scope]
            metrics = [name for name in found_now.metrics if name != found_now.measures.primary]
            own |= {name: getattr(found_now.primary, name) for name in (*STATS, "undefined")} | {"round": line.round}
            own |= {name: found_now.metrics[name].mean for name in metrics}
            own |= _bytes(line.traffic_total, "up", "down", "bytes_until_round")
            own["seconds"] = sum(each.total_seconds for each in run.history if each.round <= line.round)
        if hit := None if target is None else first_at(run, target):
            own |= {"rounds_to_target": hit.round, "bytes_to_target": both_ways(hit.traffic_total)}
        found.append(own)
    names = [name for name in found[0] if all(name in own for own in found)]
    figures = {name: Spread(tuple(own[name] for own in found)) for name in names}
    reached = sum("rounds_to_target" in own for own in found)
    return Row(group, scope, tuple(name for name in metrics if name in figures), reached, figures)


def first_at(run: Run, target: float) -> RoundMetrics | None:
    """Return the first evaluated round in which the reported model's test mean is as good as the target."""
    scope, goal = run.reported, target if run.higher else -target
    lines = (line for line in run.history if scope in line.evaluations)
    return next((line for line in lines if line.evaluations[scope].score >= goal - TOLERANCE), None)


def common_target(runs: Sequence[Run]) -> float | None:
    """Return the best mean that every run reaches, rounded to the worse by 0.01; None if a run has none."""
    best = [run.stats("best_test_oracle") for run in runs]
    scores = [stats.score for stats in best if stats is not None and math.isfinite(stats.score)]
    if not scores or len(scores) < len(best):
        return None
    return (1 if runs[0].higher else -1) * math.floor(min(scores) * 100 + TOLERANCE) / 100


def both_ways(traffic: Traffic) -> int:
    """Return the bytes sent in both directions."""
    return traffic.up_bytes + traffic.down_bytes


def _bytes(traffic: Traffic, *names: str) -> dict[str, float]:
    return dict(zip(names, (traffic.up_bytes, traffic.down_bytes, both_ways(traffic)), strict=True))


@dataclass(frozen=True, slots=True)
class Difference:
    """The primary metric of a group minus that of the reference, over pairs (client, seed).

    Args:
        group: the group.
        pairs: number of pairs; clients without test examples, or for which it is undefined, are left out.
        mean: mean difference; None without pairs.
        low: lower end of the bootstrap interval of the mean; None with fewer than two pairs.
        high: upper end of the interval.
        better: number of pairs in which the group is better.
        equal: number of pairs with equal values.
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
    found = []
    for group in (group for group in groups if group is not reference):
        values = client_differences(group, reference, choice)
        higher, lower = int((values > 0).sum()), int((values < 0).sum())
        better, worse = (higher, lower) if reference.runs[0].higher else (lower, higher)
        mean, equal = float(values.mean()) if len(values) else None, len(values) - better - worse
        found.append(Difference(group, len(values), mean, *interval(values), better, equal, worse, wilcoxon(values)))
    adjusted = iter(holm([d.p for d in found if d.p is not None]))
    return [replace(d, p_holm=None if d.p is None else next(adjusted)) for d in found]


def client_differences(group: Group, reference: Group, choice: Choice) -> np.ndarray:
    """Return the difference in the primary metric for every client and every seed that both groups have."""
    others, name = {run.seed: run for run in reference.runs}, reference.runs[0].primary
    pairs = [(_counts(run, choice), _counts(others[run.seed], choice)) for run in group.runs if run.seed in others]
    if name == "accuracy":
        found = [((ours["correct"] - theirs["correct"]) / ours["total"]).dropna() for ours, theirs in pairs]
    else:
        found = [(ours[name] - theirs[name]).dropna() for ours, theirs in pairs]
    return np.concatenate(found or [[]])


def _counts(run: Run, choice: Choice) -> DataFrame:
    line = run.at(choice)
    if line is None:
        return run.counts(-1)
    found, expected = run.counts(line.round), line.evaluations[run.reported].clients
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


@dataclass(frozen=True, slots=True)
class Comparison:
    """Groups side by side.

    Args:
        rows: one for each group.
        choice: the round that figures are taken from.
        target: the mean of the primary metric to reach; None if no run is evaluated.
        target_given: whether the caller set the target.
        reference: the group that the others are compared with.
        differences: one for each other group.
        objections: reasons why the groups should not be compared.
    """

    rows: tuple[Row, ...]
    choice: Choice
    target: float | None
    target_given: bool
    reference: Group
    differences: tuple[Difference, ...]
    objections: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the rows."""
        return tuple(row.group for row in self.rows)

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics besides the primary one that a row has."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    @property
    def primary(self) -> str:
        """The metric that is compared."""
        return self.runs[0].primary

    @property
    def higher(self) -> bool:
        """Whether a higher value of it is better."""
        return self.runs[0].higher

    @property
    def runs(self) -> list[Run]:
        """The runs of all groups."""
        return [run for group in self.groups for run in group.runs]


def compare(
    groups: Sequence[Group], choice: Choice | None = None, target: float | None = None, reference: str | None = None
) -> Comparison:
    """Compare groups; client by client only if they have the same examples and the same evaluation.

    Args:
        groups: at least one.
        choice: the round that figures are taken from; None: `best_val` if all runs have validation data, else `last`.
        target: a mean to reach; None: the best that every run reaches, rounded to the worse by 0.01.
        reference: label or method of the group to compare with; None: Local if present, else the first group.

    Raises:
        SettingsError: a run has no such round, or the reference does not exist.
    """
    base = find_reference(groups, reference)
    runs = [run for group in groups for run in group.runs]
    without = [run for run in runs if run.at("best_val") is None]
    if choice == "best_val" and without:
        raise SettingsError(f"--at best_val: {without[0].folder} has no validation results; use --at last")
    choice = choice or ("last" if without else "best_val")
    goal = common_target(runs) if target is None else target
    rows = tuple(row(group, choice, goal) for group in groups)
    found = () if check_evaluation(groups) else tuple(differences(groups, base, choice))
    return Comparison(rows, choice, goal, target is not None, base, found, tuple(check_comparable(groups)))


def compare_sets(runs: Iterable[Run], reference: str | None = None, **options: Any) -> list[Comparison]:
    """Compare each set of runs with the same examples and the same evaluation.

    If no two groups share a set, as in a sweep over partitions with one method, all groups are compared at once. A set
    without the reference uses the default one, unless no set has it. See `compare` for the reference and the options.
    """
    groups = group_runs(runs)
    sets: list[list[Group]] = []  # in order of first appearance
    for group in groups:
        fitting = next((members for members in sets if not check_evaluation([*members, group])), None)
        if fitting is None:
            sets.append([group])
        else:
            fitting.append(group)
    if all(len(members) == 1 for members in sets):
        sets = [groups]
    # Group again: labels show what differs within the set.
    sets = [group_runs(run for group in members for run in (*group.runs, *group.left_out)) for members in sets]
    known = [any(reference in (group.label, group.method) for group in members) for members in sets]
    names = [reference if has or not any(known) else None for has in known]
    return [compare(members, reference=name, **options) for members, name in zip(sets, names, strict=True)]
