"""Runs put together that differ in their seed alone, and whether such groups can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pflsim.analysis.results.run import Run
from pflsim.analysis.results.settings import run_settings, written
from pflsim.config.components import COMPONENTS
from pflsim.errors import SettingsError

FEDERATION = ("data", "partition", "split", "clients")
"""Who holds what follows from these and the seed. Where a seed is in two groups, the partition's hash decides."""
PROTOCOL = ("eval.on", "eval.every", "eval.holdout_clients")
"""On whom a model is judged and how often: the rounds that a figure may be chosen from, and whose target is seen."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed.

    What cannot change a result, or names a place, does not count; see `pflsim.analysis.results.settings.IGNORED`.

    Args:
        label: the method's name, and the settings in which the groups differ; no two groups have the same.
        method: the method's name.
        settings: those settings by dotted key. A part that is another has its name here (`model: mlp`), and its own
            settings only beside other groups with the same part.
        runs: by ascending seed, each seed once.
        left_out: further runs of the same seeds, whose records say the same.
    """

    label: str
    method: str
    settings: Mapping[str, Any]
    runs: tuple[Run, ...]
    left_out: tuple[Run, ...] = ()

    @property
    def seeds(self) -> tuple[int, ...]:
        """The runs' seeds, ascending."""
        return tuple(run.seed for run in self.runs)

    @property
    def complete(self) -> bool:
        """Whether all runs are."""
        return all(run.complete for run in self.runs)


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Put runs together by method and settings, in order of their first appearance.

    Of runs with the same settings and seed one counts, the one that went farthest, if their records agree as far as
    both go: it was repeated, which is no further evidence.

    Raises:
        SettingsError: two runs with the same settings and seed differ; names both folders.
    """
    found: list[tuple[dict[str, Any], list[Run]]] = []
    for run in runs:
        key = run_settings(run)
        same = next((members for other, members in found if other == key), None)
        if same is None:
            found.append((key, [run]))
        else:
            same.append(run)
    keys = [key for key, _ in found]
    groups = []
    for key, members in found:
        told = {name: value for name, value in key.items() if name != "method" and _tells_apart(name, key, keys)}
        label = " ".join([key["method"], *(f"{name}={written(value)}" for name, value in told.items())])
        kept, left_out = _each_seed_once(label, members)
        groups.append(Group(label, key["method"], told, kept, left_out))
    return groups


def _tells_apart(name: str, key: Mapping[str, Any], keys: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a setting differs between the groups that can have it: a part's own, between those with that part."""
    part = name.partition(".")[0]
    peers = [other for other in keys if name == part or part not in COMPONENTS or other[part] == key[part]]
    return any(name not in other or other[name] != key[name] for other in peers)


def _each_seed_once(label: str, runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    kept: dict[int, Run] = {}
    left_out: list[Run] = []
    for run in runs:
        other = kept.get(run.seed)
        if other is None:
            kept[run.seed] = run
            continue
        if not _say_the_same(run, other):
            raise SettingsError(
                f"{other.folder} and {run.folder} are both {label} with seed {run.seed}, and their results differ: "
                "leave one of them out"
            )
        farther = len(run.history) > len(other.history) or (run.complete and not other.complete)
        kept[run.seed] = run if farther else other
        left_out.append(other if farther else run)
    return tuple(kept[seed] for seed in sorted(kept)), tuple(left_out)


def _say_the_same(a: Run, b: Run) -> bool:
    """Whether two runs have the same examples, accuracy and traffic, as far as both go."""
    if a.partition_hash != b.partition_hash or a.reported != b.reported:
        return False
    scope = a.reported
    for one, other in zip(a.history, b.history, strict=False):
        figures = [
            (line.round, line.traffic, None if stats is None else (stats.clients, stats.mean, stats.weighted_mean))
            for line in (one, other)
            for stats in [line.accuracy.get(scope)]
        ]
        if figures[0] != figures[1]:
            return False
    return True


def check_comparable(groups: Sequence[Group]) -> list[str]:
    """Why groups cannot be compared, in plain words; nothing where they can.

    They can where every seed has the same partition (`FEDERATION`) in all groups, all have the same seeds, they are
    evaluated alike (`PROTOCOL`) and all their runs are complete. Model, rounds, learning rate and the like may differ:
    they are in the labels. So may the model that a method is judged by, which belongs to the method.
    """
    return [*check_evaluation(groups), *_seeds(groups), *_incomplete(groups)]


def check_evaluation(groups: Sequence[Group]) -> list[str]:
    """Why figures of the groups are not about the same thing: other examples, or another way of evaluation."""
    return [*_examples(groups), *_protocol(groups)]


def _examples(groups: Sequence[Group]) -> Iterator[str]:
    by_seed: dict[int, dict[str, list[Group]]] = {}
    for group in groups:
        for run in group.runs:
            by_seed.setdefault(run.seed, {}).setdefault(run.partition_hash, []).append(group)
    conflicts = {seed: holders for seed, holders in by_seed.items() if len(holders) > 1}
    different = [_values(key, groups) for key in _differing(groups, FEDERATION)]
    if conflicts and different:
        yield f"the clients hold other examples: {', '.join(different)}"
    elif conflicts:
        seed, holders = next(iter(conflicts.items()))
        seen = ", ".join(f"{digest[:8]} ({_labels(having)})" for digest, having in holders.items())
        yield f"the partition's hash differs in seed {seed}, though its settings are the same: {seen}"
    elif different and any(set(a.seeds).isdisjoint(b.seeds) for a in groups for b in groups):
        yield f"no seed in common that would show whether the clients hold the same examples: {', '.join(different)}"


def _protocol(groups: Sequence[Group]) -> Iterator[str]:
    for key in _differing(groups, PROTOCOL):
        yield f"they are evaluated in another way: {_values(key, groups)}"
    on_participants = any(run_settings(run)["eval.on"] == "participants" for group in groups for run in group.runs)
    if on_participants and any(_differing(groups, ["fraction"])):
        yield f"with eval.on=participants others are evaluated: {_values('fraction', groups)}"


def _seeds(groups: Sequence[Group]) -> Iterator[str]:
    found: dict[tuple[int, ...], list[Group]] = {}
    for group in groups:
        found.setdefault(group.seeds, []).append(group)
    if len(found) > 1:
        seen = ", ".join(f"{written(seeds)} ({_labels(having)})" for seeds, having in found.items())
        yield f"the seeds are not the same: {seen}"


def _incomplete(groups: Sequence[Group]) -> Iterator[str]:
    for run in (run for group in groups for run in group.runs if not run.complete):
        yield f"{run.folder} is not complete: {run.done} of {run.summary['rounds_planned']} rounds are done"


def _differing(groups: Sequence[Group], prefixes: Sequence[str]) -> list[str]:
    keys = list(dict.fromkeys(key for group in groups for key in group.settings))
    belongs = [key for key in keys if key in prefixes or key.partition(".")[0] in prefixes]
    return [key for key in belongs if len({written(group.settings.get(key)) for group in groups}) > 1]


def _values(key: str, groups: Sequence[Group]) -> str:
    values = [written(group.settings[key]) for group in groups if key in group.settings]
    return f"{key}={' or '.join(dict.fromkeys(values))}"


def _labels(groups: Sequence[Group]) -> str:
    labels = [group.label for group in groups]
    told = next(n for n in (len(labels), 3, 1) if n == 1 or (n < 5 and len(", ".join(labels[:n])) < 80))
    return ", ".join(labels[:told]) + (f" and {len(labels) - told} more" if told < len(labels) else "")
