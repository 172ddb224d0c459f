"""A comparison of groups: their primary metric, traffic and time over seeds, and the differences between them."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from pflsim.analysis.differences import ALPHA, Difference, Family, family, identical, values_of
from pflsim.analysis.groups import Group, check_comparable, check_evaluation, group_runs
from pflsim.analysis.runs import Run
from pflsim.analysis.targets import On, Target, find_target
from pflsim.analysis.verdict import sentences
from pflsim.config.names import nearest
from pflsim.display.formats import CHOSEN, Choice
from pflsim.display.identity import Identity, identity
from pflsim.display.metrics import scale_of
from pflsim.errors import SettingsError
from pflsim.progress import counted
from pflsim.records.evaluation import Scope
from pflsim.records.history import RoundMetrics, Traffic
from pflsim.types import ModelKind

STATS = ("mean", "weighted_mean", "worst_decile", "median", "best_decile", "std")
"""Fields of `pflsim.records.evaluation.Stats`, of the primary metric, among the figures of a row."""
LEAST = 0.04
"""Least length of an axis: of an accuracy in its own unit, of other metrics as a part of the reference's value."""


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
        hits: the first evaluated round of each run that reaches the target; None: it does not.
        deltas: the differences to the references of a comparison; None: it is the reference, or there is no difference.
        figures: values by name; a figure that a run lacks is left out. The figures are

            - `STATS`, `undefined` and `metrics`: the primary metric over clients, and means over clients;
            - `epsilon`: ε of differential privacy up to that round; of examples, the largest of a client;
            - `round`; `up`, `down`, `bytes_until_round`, `seconds`: bytes that all clients sent, received, and both,
              and seconds of the rounds (of the virtual clock, if the run has one), up to that round;
            - `up_total`, `down_total`, `bytes_total`, `seconds_total`: of the whole run, with its start;
            - `rounds_to_target`, `up_to_target`, `bytes_to_target`, `seconds_to_target`: that round, and the bytes that
              clients sent, those in both directions and the seconds up to it;
            - `times_fewer_rounds`: the number of rounds of the reference to the target, divided by the group's.
    """

    group: Group
    scope: Scope
    metrics: tuple[str, ...]
    hits: tuple[int | None, ...]
    figures: Mapping[str, Spread]
    deltas: tuple[Difference | None, ...] = ()

    @property
    def label(self) -> str:
        """The name for readers."""
        return self.group.label

    @property
    def reached(self) -> int:
        """The number of seeds that reach the target."""
        return len(self.hits) - self.hits.count(None)

    @property
    def who(self) -> Identity:
        """The colour and the mark."""
        return identity(self.group.method)

    @property
    def rounds(self) -> tuple[int, ...]:
        """The chosen round of each run, in seed order; empty if a run has no such round."""
        return tuple(map(int, self.figures["round"].values)) if "round" in self.figures else ()


def row(group: Group, choice: Choice, target: Target | None = None, model: ModelKind | None = None) -> Row:
    """Return the figures of a group.

    Args:
        group: the runs.
        choice: the round that figures are taken from.
        target: the mean to reach; None: no run reaches it.
        model: the evaluated model; None: the reported model.
    """
    scope = group.runs[0].scope(model)
    found, metrics, hits = list[dict[str, float]](), list[str](), list[int | None]()

    def seconds(run: Run, until: RoundMetrics) -> float:
        return sum(line.clock_seconds for line in run.history if line.round <= until.round)

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
            own["seconds"] = seconds(run, line)
            if (spent := run.epsilon(line.round)) is not None:
                own["epsilon"] = spent
        if hit := target and target.first(run):
            own |= {"rounds_to_target": hit.round, "seconds_to_target": seconds(run, hit)}
            own |= _bytes(hit.traffic_total, "up_to_target", "down_to_target", "bytes_to_target")
        hits.append(hit and hit.round)
        found.append(own)
    names = [name for name in found[0] if all(name in own for own in found)]
    figures = {name: Spread(tuple(own[name] for own in found)) for name in names}
    return Row(group, scope, tuple(name for name in metrics if name in figures), tuple(hits), figures)


def _faster(row: Row, hits: Mapping[int, int | None]) -> Row:
    """Return the figures of a row with `times_fewer_rounds`, if all seeds of the row and of the reference reach it."""
    if None in (*row.hits, *hits.values()) or not {*row.group.seeds} <= {*hits}:
        return row
    times = [(hits[seed] or 1) / (own or 1) for seed, own in zip(row.group.seeds, row.hits, strict=True)]
    return replace(row, figures={**row.figures, "times_fewer_rounds": Spread(tuple(times))})


def score(group: Group, choice: Choice) -> float:
    """Return the mean score of the primary metric in a round: on validation data if these chose it, else on test."""
    lines = [(run, run.at(choice)) for run in group.runs]
    split = "val" if choice == "best_val" else group.runs[0].on
    scores = [line.evaluations[run.reported._replace(split=split)].score for run, line in lines if line]
    return statistics.fmean(scores or [-math.inf])


def best_first(rows: Sequence[Row]) -> list[Row]:
    """Return the rows by the mean of the primary metric over clients and seeds; rows without it are left out."""
    found = [row for row in rows if "mean" in row.figures]
    return sorted(
        found, key=lambda row: row.figures["mean"].mean, reverse=bool(found) and found[0].group.runs[0].higher
    )


def both_ways(traffic: Traffic) -> int:
    """Return the bytes sent in both directions."""
    return traffic.up_bytes + traffic.down_bytes


def _bytes(traffic: Traffic, *names: str) -> dict[str, float]:
    return dict(zip(names, (traffic.up_bytes, traffic.down_bytes, both_ways(traffic)), strict=True))


def _named(groups: Sequence[Group], name: str | None) -> list[Group]:
    """Return the groups with this label or method, as it is written for readers or in the settings."""
    exact = [group for group in groups if name in (group.label, group.name)]
    return exact or [group for group in groups if name in (group.method, identity(group.method).display)]


def find_reference(groups: Sequence[Group], name: str | None) -> Group:
    """Return the group with this label or method, see `_named`; by default Local, else FedAvg, else the first group.

    Raises:
        SettingsError: no group has this name, or several groups have this method.
    """
    if name is None:
        return next((group for m in ("local", "fedavg") for group in groups if group.method == m), groups[0])
    if not (found := _named(groups, name)):
        raise SettingsError(f"--reference {name}: {nearest(name, [group.name for group in groups])}")
    if len(found) > 1:
        names = ", ".join(group.name for group in found)
        raise SettingsError(f"--reference {name}: several groups have this method; choose one of: {names}")
    return found[0]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Groups side by side.

    Args:
        rows: one for each group.
        choice: the round that figures are taken from.
        target: the mean of the primary metric to reach; None if a run is not evaluated.
        families: the differences to the reference and, if FedAvg is another of three or more groups, those to FedAvg.
            Without differences if the groups have other examples or another evaluation.
        tied: labels from the best mean down to the first group that differs from it by Wilcoxon's test, in a Holm
            family of its own.
        identical: labels of groups with equal values of the primary metric on every client in every seed.
        objections: reasons why the groups should not be compared.
        lead: the evidence that the best is ahead of the next; "" if there are none.
        missing: runs that do not count, because others with their method or seed are missing.
        baselines: rows of `pflsim baselines`, which are in no family and in no sentence, unless there are no others.
    """

    rows: tuple[Row, ...]
    choice: Choice
    target: Target | None
    families: tuple[Family, ...]
    tied: tuple[str, ...] = ()
    identical: tuple[tuple[str, ...], ...] = ()
    objections: tuple[str, ...] = ()
    lead: str = ""
    missing: tuple[str, ...] = ()
    baselines: tuple[Row, ...] = ()

    @property
    def reference(self) -> Group:
        """The group that the others are compared with."""
        return self.families[0].reference

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences of the other groups to the reference."""
        return self.families[0].differences

    @property
    def paired(self) -> bool:
        """Whether there are differences, of groups that can be compared."""
        return bool(self.differences) and not self.objections

    @property
    def beside(self) -> list[tuple[Row, float]]:
        """The baselines, and the difference of their mean to that of the reference, without a test."""
        base = [row.figures["mean"].mean for row in self.rows if row.group is self.reference and row.rounds]
        return [(row, row.figures["mean"].mean - base[0]) for row in self.baselines if base and self.paired]

    @property
    def sentences(self) -> list[str]:
        """What the differences show; see `pflsim.analysis.verdict.sentences`."""
        means = {row.label: row.figures["mean"].mean for row in best_first(self.rows)}
        return sentences(means, self.families[0], self.tied, self.objections, self.lead)

    @property
    def lines(self) -> list[Row]:
        """The rows, best first; as given if the groups cannot be compared."""
        return list(self.rows) if self.objections else best_first(self.rows)

    @property
    def seeds(self) -> int:
        """The largest number of seeds of a group."""
        return max(len(group.runs) for group in self.groups)

    @property
    def least(self) -> float:
        """The least length of an axis of the primary metric (`LEAST`)."""
        own = [row.figures["mean"].mean for row in self.rows if row.group is self.reference and row.rounds]
        return LEAST * (abs(own[0]) if own and not scale_of(self.primary)[2] else 1.0) or LEAST

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the rows."""
        return tuple(row.group for row in self.rows)

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics besides the primary one that a row has; the number of tokens is none."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics if name != "tokens"))

    @property
    def primary(self) -> str:
        """The metric that is compared."""
        return self.families[0].metric

    @property
    def higher(self) -> bool:
        """Whether a higher value of it is better."""
        return self.families[0].higher

    @property
    def runs(self) -> list[Run]:
        """The runs of all groups."""
        return [run for group in self.groups for run in group.runs]


def compare(
    groups: Sequence[Group],
    choice: Choice | None = None,
    target: float | str | None = None,
    reference: str | None = None,
    target_on: On = "test",
) -> Comparison:
    """Compare groups; client by client only if they have the same examples and the same evaluation.

    Args:
        groups: at least one.
        choice: the round that figures are taken from; None: `best_val` if all runs have validation data, else `last`.
        target: see `find_target`.
        reference: label or method of the group to compare with; None: the group with the best `score` if all have the
            same method, else see `find_reference`.
        target_on: the examples whose mean must reach the target.

    Raises:
        SettingsError: a run has no such round, the reference does not exist, or the target is wrong.
    """
    if choice is not None and choice not in CHOSEN:
        raise SettingsError(f"--at {choice}: {nearest(choice, CHOSEN)}")
    baselines = [group for group in groups if group.is_baseline]
    groups = [group for group in groups if not group.is_baseline] or groups
    baselines = [] if groups[0] in baselines else baselines
    runs = [run for group in (*groups, *baselines) for run in group.runs]
    without = [run for run in runs if run.at("best_val") is None]
    if choice == "best_val" and without:
        raise SettingsError(f"--at best_val: {without[0].folder} has no validation results; use --at last")
    choice = choice or ("last" if without else "best_val")
    base = find_reference(groups, reference)
    if reference is None and len({group.method for group in groups}) == 1:
        base = max(groups, key=lambda group: score(group, choice))
    goal = find_target(target, target_on, base.runs, [run for group in groups for run in group.runs], choice)
    rows = tuple(row(group, choice, goal) for group in groups)
    own = next(row.hits for row in rows if row.group is base)
    rows = tuple(_faster(row, dict(zip(base.seeds, own, strict=True))) for row in rows)
    families, tied, same, lead = (Family(base),), (), (), ""
    if len(groups) > 1 and not groups[0].is_baseline and not check_evaluation(groups):
        values = values_of(groups, choice)
        others = [group for group in groups if group.method == "fedavg" and group is not base and len(groups) > 2]
        families = tuple(family(groups, each, values) for each in (base, *(others if len(others) == 1 else ())))
        same = identical(values, runs[0].primary)
        if ordered := [row.group for row in best_first(rows)]:
            against = family(ordered, ordered[0], values).differences
            alike = takewhile(lambda d: d.p_holm is None or d.p_holm >= ALPHA, against)
            equal = next((labels for labels in same if ordered[0].label in labels), ())
            lead = next((d.level for d in against), "")
            tied = (ordered[0].label, *(d.group.label for d in alike if d.group.label not in equal))
    found = [{d.group.label: d for d in each.differences} for each in families]
    rows = tuple(replace(row, deltas=tuple(own.get(row.label) for own in found)) for row in rows)
    objections, untested = tuple(check_comparable(groups)), (None,) * len(families)
    beside = [replace(row(group, choice, goal), deltas=untested) for group in baselines]
    found = Comparison(rows, choice, goal, families, tied, same, objections, lead)
    return replace(found, baselines=tuple(best_first(beside) if beside else ()))


def frontier(comparison: Comparison) -> list[Row]:
    """Return the rows on the frontier of cost: by bytes of the whole run, each clearly better than the one before.

    With one seed nothing is clear, and the mean decides.
    """
    groups, values = comparison.groups, values_of(comparison.groups, comparison.choice)
    first, *others = sorted(best_first(comparison.rows), key=lambda row: row.figures["bytes_total"].mean)
    found, known = [first], {each.reference.label: each for each in comparison.families}
    for row in others:
        last = found[-1].group
        known[last.label] = each = known.get(last.label) or family(groups, last, values)
        d = next(d for d in each.differences if d.group is row.group)
        if d.mean and each.gains(d) and (d.level == "clear" or comparison.seeds == 1):
            found.append(row)
    return found


def compare_sets(runs: Iterable[Run], reference: str | None = None, **options: Any) -> list[Comparison]:
    """Compare each set of runs with the same examples and the same evaluation, with the same seeds of all groups.

    Groups or seeds for which runs are missing are left out, so that the most runs count; baselines do not decide which.
    If no two groups share a set,
    as in a sweep over partitions with one method, all groups are compared at once. A set without the reference uses
    the default one, unless no set has it. See `compare` for the reference and the options.
    """
    groups = group_runs(runs)
    sets: list[list[Group]] = []  # in order of first appearance
    for group in sorted(groups, key=lambda group: group.is_baseline):
        fitting = [members for members in sets if not check_evaluation([*members, group])]
        for members in fitting if group.is_baseline else fitting[:1]:
            members.append(group)
        sets += [] if fitting else [[group]]
    if all(len(members) == 1 for members in sets):
        sets = [groups]
    # Group again: labels show what differs within the set.
    sets = [group_runs(r for g in members for r in (*g.runs, *g.left_out)) for members in sets]
    known = [bool(_named(members, reference)) for members in sets]
    names = [reference if has or not any(known) else None for has in known]
    found = list[Comparison]()
    for members, name in counted("comparing the runs", [*zip(sets, names, strict=True)]):
        judged = [group for group in members if not group.is_baseline] or members
        kept = _largest_table(judged, _named(judged, name))
        seeds = {seed for group in kept for seed in group.seeds}
        others = [group for group in members if group not in judged and seeds <= {*group.seeds}]
        kept += [replace(g, runs=tuple(run for run in g.runs if run.seed in seeds)) for g in others]
        used = {run.folder for group in kept for run in (*group.runs, *group.left_out)}
        out = (run for group in members for run in group.runs if run.folder not in used)
        missing = tuple(f"{identity(run.method).display} seed {run.seed}" for run in out)
        found.append(replace(compare(kept, reference=name, **options), missing=missing))
    return found


def _largest_table(groups: list[Group], needed: Sequence[Group]) -> list[Group]:
    """Return the groups without those, or the seeds, for which runs are missing.

    Of two groups at least, the most runs count. The groups that are needed stay. If no two groups have a seed in
    common, all are returned.
    """

    def having(seeds: Sequence[int]) -> list[Group]:
        return [group for group in groups if {*seeds} <= {*group.seeds}]

    every = [group.seeds for group in groups]
    complete = [seeds for seeds in every if all(group in having(seeds) for group in needed)]
    seeds = max(complete or every, key=lambda seeds: (len(having(seeds)) > 1, len(seeds) * len(having(seeds))))
    if all(each == seeds for each in every) or len(having(seeds)) == 1:
        return groups
    return group_runs(run for g in having(seeds) for run in (*g.runs, *g.left_out) if run.seed in seeds)
