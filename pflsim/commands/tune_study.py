"""A study of `pflsim tune`: methods and spaces, the plan in tuned.json, trials in Optuna's journal, and the choice."""

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from pflsim.config.compose import Several, composed, to_settings
from pflsim.config.names import written
from pflsim.config.settings import Settings, dotted
from pflsim.display.formats import in_text
from pflsim.errors import SettingsError
from pflsim.records.files import keys, read_json, write_atomically
from pflsim.records.folder import LOCK
from pflsim.records.older_settings import with_older
from pflsim.records.saved_settings import fixed_settings

STUDY, JOURNAL = "tuned.json", "optuna.journal"
FAILED = -1e9
"""The score of a trial that failed: worse than all others."""
DRAWS = 20
"""How often Optuna is asked for a point that has not been tried."""
SHARED = {"lr": {"low": 0.001, "high": 1.0, "log": True}}
"""What every method searches."""
FIXED = {
    *("method", "data", "shift", "partition", "split", "clients", "eval", "seed", "rounds", "faults"),
    *("run_dir", "executor", "placement", "sweep"),
}
"""Settings that must be the same for all trials, or the trials could not be compared."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a study.

    Args:
        name: on the command line.
        given: settings of all its runs, by dotted key.
        folders: config folders.
        space: to search. By the key of a setting, a list of choices or a range: `low`, `high`, and `log: true` for a
            log scale.
    """

    name: str
    given: Mapping[str, Any]
    folders: Sequence[Path]
    space: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, values: Mapping[str, Any]) -> Settings:
        """Return the settings of a run.

        Args:
            values: of settings, by dotted key.

        Raises:
            SettingsError: a setting refuses its value.
        """
        return to_settings(composed({**self.given, **values}, self.folders))

    def first_point(self) -> dict[str, Any]:
        """Return the values of the first trial: those without a search, or the nearest ones of the space.

        No range contains null: a setting that is null keeps it, and is left out.
        """
        settings, point = self.settings({}), dict[str, Any]()
        for key, node in self.space.items():
            value = _value(settings, key)
            if isinstance(node, list):
                point[key] = value if value in node else node[0]
            elif value is not None:
                value = min(max(value, node["low"]), node["high"])
                point[key] = round(value) if is_discrete(node) else value
        return point


def methods_of(given: Mapping[str, Any], folders: Sequence[Path]) -> list[Method]:
    """Return the methods that settings name, checked.

    Args:
        given: `method`, settings, and `search.KEY` or `search.METHOD.KEY` with a space, where None is no search.
        folders: config folders.

    Raises:
        SettingsError: a setting or a space is wrong.
    """
    names, searched, others = list[str](), dict[str, Any](), dict[str, Any]()
    for key, value in given.items():
        if key == "method":
            names = list(dict.fromkeys(map(str, value if isinstance(value, Several) else [value])))
        elif key in ("run_dir", "resume", "into"):
            raise SettingsError(f"{key}={value}: tune does not take {key}; the folder of the study is --into DIR")
        elif isinstance(value, Several):
            line = f"{key}={','.join(map(written, value))}"
            raise SettingsError(f"{line}: only method takes several values; search.KEY=[...] searches a setting")
        elif key.startswith("search."):
            searched[key.removeprefix("search.")] = value
        else:
            others[key] = value
    if not names:
        raise SettingsError("method is not set; give the methods to compare, method=local,fedavg,ditto")
    methods = [Method(name, {"method": name, "executor": "inline", **others}, folders) for name in names]
    return [_method(method, names, searched) for method in methods]


def _method(method: Method, names: Sequence[str], searched: Mapping[str, Any]) -> Method:
    """Return a method with its space."""
    settings = method.settings({})
    if not settings.split.get("validation", True):
        raise SettingsError("split.validation=0: tune chooses by validation data; set split.validation above 0")
    if settings.ray_address and settings.executor == "inline":
        raise SettingsError(f"ray_address={settings.ray_address}: tune runs inline; add executor=ray")
    space = {**SHARED, **composed(method.given, method.folders).search}
    for key, node in searched.items():
        owner = next((name for name in names if key.startswith(f"{name}.")), None)
        if owner in (None, method.name):
            space[key if owner is None else _of_method(key.removeprefix(f"{owner}."))] = node
    return replace(method, space={key: _checked(method, key, node) for key, node in space.items() if node is not None})


def _of_method(key: str) -> str:
    """Return the dotted key of a method's setting, or of its server optimiser's, in a space."""
    return key if key.startswith("server_optimizer.") else f"method.{key}"


def _checked(method: Method, key: str, node: Any) -> Any:
    """Return the space of a setting after checking that the setting accepts it, with choices of the setting's type."""
    text = f"search.{key}={written(node)} of {method.name}"
    if key.partition(".")[0] in FIXED and not key.startswith("method."):
        raise SettingsError(f"{text}: all trials have the same {key}, or they could not be compared")
    is_range = isinstance(node, Mapping) and {"low", "high"} <= set(node) <= {"low", "high", "log"}
    if not is_range and not (isinstance(node, list) and node):
        raise SettingsError(f"{text}: expected a list of choices or {{low: L, high: H, log: true}}")
    try:
        values = [node["low"], node["high"]] if isinstance(node, Mapping) else node
        found = [method.settings({key: value}) for value in values]
        distribution(node)
    except ValueError as error:  # a `SettingsError`, or of Optuna
        raise SettingsError(f"{text}: {error}") from None
    return node if is_range else [_value(settings, key) for settings in found]


def settings_text(values: Mapping[str, Any]) -> str:
    """Return values or spaces by key as text: `lr=0.1 method.mu=1`."""
    return " ".join(f"{key}={written(value)}" for key, value in values.items()) or "nothing"


def is_discrete(node: Any) -> bool:
    """Return whether a space is a list of choices, or a range of whole numbers."""
    return isinstance(node, list) or type(node["low"]) is type(node["high"]) is int


def _value(settings: Settings, key: str) -> Any:
    """Return a setting, or the chosen option of a group."""
    return settings.names[key] if key in settings.names else dotted(asdict(settings))[key]


def distribution(node: Any) -> Any:
    """Return choices or a range as a distribution of Optuna.

    Raises:
        ValueError: the range is empty, or has no logarithm.
    """
    if isinstance(node, list):
        return CategoricalDistribution(node)
    kind = IntDistribution if is_discrete(node) else FloatDistribution
    return kind(node["low"], node["high"], log=bool(node.get("log")))


class Study:
    """The same number of trials for every method; each method is a study in the journal.

    Args:
        folder: of all files; locked.
        options: of the command line.
        methods: to compare.

    Raises:
        SettingsError: the folder has another study, or other files.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], methods: Sequence[Method]) -> None:
        self.folder, self.options, self.methods = folder, options, methods
        self.asked = list[tuple[Method, FrozenTrial]]()
        self.budget, self.seed = int(options["trials"]), methods[0].settings({}).seed
        plan = {
            "methods": [method.name for method in methods],
            **{key: options[key] for key in ("trials", "seeds", "rounds")},
            "space": {method.name: method.space for method in methods},
            "settings": {method.name: fixed_settings(method.settings({})) for method in methods},
        }
        self.plan = json.loads(json.dumps(plan))
        now = before = dotted(self.plan)
        if (folder / STUDY).exists():
            before = with_older(dotted(read_json(folder / STUDY, keys({"plan": Mapping[str, Any]}))["plan"]))
        elif {file.name for file in folder.iterdir()} - {LOCK, JOURNAL}:
            raise SettingsError(f"{folder} is not empty and has no {STUDY}; choose a new folder")
        if differing := [key for key in {**now, **before} if before.get(key) != now.get(key)]:
            raise SettingsError(f"{folder} has a study with another {', '.join(differing[:3])}; choose a new folder")
        storage = _open_journal(folder / JOURNAL)
        create = partial(optuna.create_study, storage=storage, direction="maximize", load_if_exists=True)
        self.journal = {name: create(study_name=name) for name in self.plan["methods"]}

    def write(self) -> None:
        """Write the plan, and the chosen values so far."""
        chosen = {method.name: (best := self.chosen(method)) and best.params for method in self.methods}
        content = {"plan": self.plan, "chosen": chosen}
        write_atomically(self.folder / STUDY, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def trials(self, method: Method) -> list[FrozenTrial]:
        """Return the trials of a method, in the order of their numbers; those that failed have the value `FAILED`."""
        return self.journal[method.name].trials

    def failed(self, method: Method) -> dict[int, str]:
        """Return why trials of a method failed, by number."""
        return {int(number): reason for number, reason in self.journal[method.name].user_attrs.items()}

    def chosen(self, method: Method) -> FrozenTrial | None:
        """Return the trial with the best validation score, the first one of equals; None if none has one."""
        failed = self.failed(method)
        ended = [one for one in self.trials(method) if one.value is not None and one.number not in failed]
        return max(ended, key=lambda one: one.value or 0.0, default=None)

    def final_runs(self) -> list[Settings]:
        """Return the settings of the chosen values with the seeds that no trial has used."""
        rounds = {"rounds": self.options["rounds"]} if self.options["rounds"] else {}
        return [
            method.settings(best.params | rounds | {"seed": seed, "run_dir": self._folder("runs", method, f"s{seed}")})
            for method in self.methods
            if (best := self.chosen(method))
            for seed in range(self.seed + 1, self.seed + 1 + self.options["seeds"])
        ]

    def _folder(self, kind: str, method: Method, name: str) -> str:
        return str(self.folder / kind / f"{method.name}-{name}")

    def ask(self) -> Iterator[Settings]:
        """Yield the settings of the trials: those that an earlier session left, then a new one of each method in turn.

        A new trial is suggested when it is taken, from the results that are told by then.
        """
        for method, trial in self._trials_to_run():
            self.asked.append((method, trial))
            yield method.settings({**trial.params, "run_dir": self._folder("trials", method, f"{trial.number:03}")})

    def _trials_to_run(self) -> Iterator[tuple[Method, FrozenTrial]]:
        for method in self.methods:
            yield from ((method, one) for one in self.trials(method) if one.state == TrialState.RUNNING)
        for number, method in itertools.product(range(self.budget), self.methods):
            if len(tried := self.trials(method)) <= number and (point := self._suggest(method, tried)) is not None:
                kinds = {key: distribution(method.space[key]) for key in point}
                trial = create_trial(state=TrialState.RUNNING, params=point, distributions=kinds)
                self.journal[method.name].add_trial(trial)
                yield method, self.trials(method)[-1]

    def _suggest(self, method: Method, tried: Sequence[FrozenTrial]) -> dict[str, Any] | None:
        """Return a point that has not been tried; None if there is none.

        A copy in memory is asked, so that the journal has no point twice. The tree-structured Parzen estimator (TPE)
        draws points at random until ten trials have ended.
        """
        from pflsim.seeding import seed_for  # imports torch, as does `pflsim.analysis`: errors in settings come first

        if not tried:
            return method.first_point()
        seed = seed_for(self.seed, f"tune {method.name}", round_number=len(tried)) % 2**32
        copy = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        copy.add_trials(tried)
        kinds, points = {key: distribution(node) for key, node in method.space.items()}, [one.params for one in tried]
        drawn = (_rounded(copy.ask(kinds).params, method.space) for _ in range(DRAWS))
        return next((point for point in itertools.chain(drawn, _grid(method.space)) if point not in points), None)

    def tell(self, number: int, failed: str) -> str:
        """Record the result of a trial, and return a line about it.

        Args:
            number: of the trial, in the order of `ask`.
            failed: why it failed, or "". A failure is the worst result for later suggestions.
        """
        from pflsim.analysis.runs import read_run

        method, trial = self.asked[number]
        score, said, best = FAILED, "", None
        if not failed:
            run = read_run(Path(self._folder("trials", method, f"{trial.number:03}")))
            if best := run.at("best_val"):
                found = best.evaluations[run.reported._replace(split="val")]
                score = max(found.score, FAILED)
                said = f"validation {in_text(run.primary)} {found.mean:.4f} in round {best.round}"
        if best is None:
            failed = failed or "no client has validation examples"
            self.journal[method.name].set_user_attr(str(trial.number), failed)
        self.journal[method.name].tell(trial.number, score)
        said = said or f"failed: {failed}"
        ahead = f"; best: trial {leader.number + 1}" if (leader := self.chosen(method)) else ""
        return f"{method.name}: trial {trial.number + 1} of {self.budget}, {settings_text(trial.params)}: {said}{ahead}"


def _open_journal(file: Path) -> JournalStorage:
    """Return the trials of earlier sessions, without what a killed process or a full disk has left."""
    Path(f"{file}.lock").unlink(missing_ok=True)
    file.touch()
    os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
    try:
        return JournalStorage(JournalFileBackend(str(file)))
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from None


def _rounded(point: dict[str, Any], space: Mapping[str, Any]) -> dict[str, Any]:
    """Return a point whose real numbers have four significant digits, so that a table can show what ran."""
    ends = {key: (node["low"], node["high"]) for key, node in space.items() if not is_discrete(node)}
    return point | {key: min(max(float(f"{point[key]:.4g}"), low), high) for key, (low, high) in ends.items()}


def _grid(space: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the points of a finite space; none if it has real numbers."""
    nodes = space.values() if all(map(is_discrete, space.values())) else ([],)
    axes = (range(node["low"], node["high"] + 1) if isinstance(node, Mapping) else node for node in nodes)
    return (dict(zip(space, values, strict=True)) for values in itertools.product(*axes))
