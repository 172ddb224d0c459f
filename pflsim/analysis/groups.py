"""Groups of runs that differ only in their seed, and checks whether groups can be compared."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pflsim.analysis.runs import FEDERATION, PROTOCOL, Run, distinguishes, run_settings
from pflsim.config.names import written
from pflsim.display.identity import identity, is_baseline
from pflsim.errors import SettingsError


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed and in settings that do not change results (`settings.IGNORED`).

    Args:
        label: the method's name for readers (`Identity.display`) and the settings in which the groups differ, as
            `FedRep lr=0.1`, without `method.`; unique among the groups.
        method: the method's name in the settings.
        settings: the settings in the label, by dotted key. If groups use different components, the component's name is
            listed (`model: mlp`); its own settings are listed only if several groups use this component.
        runs: one run per seed, by ascending seed.
        left_out: repeated runs of the same seeds with equal results.
    """

    label: str
    method: str
    settings: Mapping[str, Any]
    runs: tuple[Run, ...]
    left_out: tuple[Run, ...] = ()

    @property
    def name(self) -> str:
        """The label with the method's name in the settings: `fedrep lr=0.1`."""
        return _with_settings(self.method, self.settings)

    @property
    def is_baseline(self) -> bool:
        """Whether these are runs of `pflsim baselines`."""
        return is_baseline(self.method)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The runs' seeds, ascending."""
        return tuple(run.seed for run in self.runs)


def _with_settings(name: str, settings: Mapping[str, Any]) -> str:
    return " ".join([name, *(f"{key}={written(value)}" for key, value in settings.items())])


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group runs by method and settings, in order of first appearance.

    If several runs have the same settings and seed, the longest one is kept, provided that their results agree. If two
    methods have the same name for readers, labels have those in the settings. If a module of the user has several
    states in these runs, it separates groups and is in the labels, as `code.MODULE=DIGEST`.

    Raises:
        SettingsError: two runs with the same settings and seed have different results; names both folders.
    """
    each = [(run_settings(run), run) for run in runs]
    states = Counter(name for name, _ in {state for _, run in each for state in run.own_code.items()})
    own_code = [{f"code.{k}": v for k, v in run.own_code.items() if states[k] > 1} for _, run in each]
    each = [({**key, **code}, run) for (key, run), code in zip(each, own_code, strict=True)]
    partitions = Counter((text, seed) for text, seed, _ in {(written(k), r.seed, r.partition_hash) for k, r in each})
    unlike = {text for (text, _), count in partitions.items() if count > 1}
    found: dict[str, tuple[dict[str, Any], list[Run]]] = {}
    for key, run in each:
        own = {**key, "partition_hash": run.partition_hash[:8]} if written(key) in unlike else key
        found.setdefault(written(own), (own, []))[1].append(run)
    keys, groups = [key for key, _ in found.values()], list[Group]()
    names = {str(key["method"]): identity(key["method"]).display for key in keys}
    distinct = len({*names.values()}) == len(names)
    for key, members in found.values():
        own = {name: value for name, value in key.items() if name != "method" and distinguishes(name, key, keys)}
        label = _with_settings(names[key["method"]] if distinct else key["method"], own).replace(" method.", " ")
        groups.append(Group(label, key["method"], own, *_one_per_seed(label, members)))
    return groups


def _one_per_seed(label: str, runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Return the longest run of every seed, and the others."""
    kept: dict[int, Run] = {}
    for run in runs:
        other = kept.setdefault(run.seed, run)
        rounds = min(len(run.history), len(other.history))
        if _results(run, rounds) != _results(other, rounds):
            both = f"{other.folder} and {run.folder} are both {label} with seed {run.seed}"
            raise SettingsError(f"{both}, and their results differ; leave one of them out")
        if len(run.history) > len(other.history) or (run.complete and not other.complete):
            kept[run.seed] = run
    return tuple(kept[seed] for seed in sorted(kept)), tuple(run for run in runs if kept[run.seed] is not run)


def _results(run: Run, rounds: int) -> list[Any]:
    """Return the partition, and the accuracy and traffic of the first rounds."""
    lines = [(line.round, line.traffic, line.evaluations.get(run.reported)) for line in run.history[:rounds]]
    figures = [(number, sent, s and (s.clients, s.mean, s.primary.weighted_mean)) for number, sent, s in lines]
    return [run.partition_hash, run.reported, figures]


def check_comparable(groups: Sequence[Group]) -> list[str]:
    """Return the reasons why groups cannot be compared; empty if they can.

    Groups can be compared if every seed has the same partition (`FEDERATION`) in all groups, all groups have the same
    seeds and the same evaluation (`PROTOCOL`). Other settings may differ, because the labels show them, and so may the
    reported model, which belongs to the method.
    """
    objections, found = check_evaluation(groups), dict.fromkeys(group.seeds for group in groups)
    if len(found) > 1:
        seen = (f"{written(seeds)} ({_labels([g for g in groups if g.seeds == seeds])})" for seeds in found)
        objections.append(f"the seeds differ: {', '.join(seen)}")
    return objections


def check_evaluation(groups: Sequence[Group]) -> list[str]:
    """Return the differences between groups in the clients' examples or in the evaluation."""
    objections = [*_examples(groups)]
    objections += [f"the evaluation differs: {_values(key, groups)}" for key in _differing(groups, PROTOCOL)]
    on_participants = any(run_settings(run)["eval.clients"] == "participants" for group in groups for run in group.runs)
    for key in _differing(groups, ["fraction", "participation"]) if on_participants else ():
        objections.append(f"eval.clients=participants evaluates different clients: {_values(key, groups)}")
    return objections


def _examples(groups: Sequence[Group]) -> Iterator[str]:
    by_seed: dict[int, dict[str, list[Group]]] = {}
    for group in groups:
        for run in group.runs:
            by_seed.setdefault(run.seed, {}).setdefault(run.examples_hash, []).append(group)
    conflicts = {seed: holders for seed, holders in by_seed.items() if len(holders) > 1}
    different = [_values(key, groups) for key in _differing(groups, FEDERATION)]
    if conflicts and different:
        yield f"the clients have different examples: {', '.join(different)}"
    elif conflicts:
        seed, holders = next(iter(conflicts.items()))
        seen = ", ".join(f"{digest[:8]} ({_labels(having)})" for digest, having in holders.items())
        yield f"the partition hash differs for seed {seed}, although the settings are equal: {seen}"
    elif different and any(set(a.seeds).isdisjoint(b.seeds) for a in groups for b in groups):
        yield f"the settings of the partition differ, and the groups have no seed in common: {', '.join(different)}"


def _differing(groups: Sequence[Group], prefixes: Sequence[str]) -> list[str]:
    keys = list(dict.fromkeys(key for group in groups for key in group.settings))
    matching = [key for key in keys if key in prefixes or key.partition(".")[0] in prefixes]
    judged = [group for group in groups if not group.is_baseline]  # baselines have one round, which is evaluated
    of = {key: judged if key == "eval.every" else groups for key in matching}
    return [key for key in matching if len({written(group.settings.get(key)) for group in of[key]}) > 1]


def _values(key: str, groups: Sequence[Group]) -> str:
    values = [written(group.settings[key]) for group in groups if key in group.settings]
    return f"{key}={' or '.join(dict.fromkeys(values))}"


def _labels(groups: Sequence[Group]) -> str:
    more = f" and {len(groups) - 3} more" if len(groups) > 3 else ""
    return ", ".join(group.label for group in groups[:3]) + more
