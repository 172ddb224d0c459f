"""A study of `pflsim tune`: its plan in tuned.json, its trials in Optuna's journal, and the choice by validation."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from pflsim.analysis.runs import read_mapping, read_run
from pflsim.commands.tune_methods import Method, distribution, is_discrete, settings_text
from pflsim.config.settings import Settings, dotted
from pflsim.errors import SettingsError
from pflsim.records.files import write_atomically
from pflsim.records.folder import LOCK
from pflsim.records.saved_settings import fixed_settings
from pflsim.seeding import seed_for

STUDY, JOURNAL = "tuned.json", "optuna.journal"
DRAWS = 20
"""How often Optuna is asked for a point that has not been tried."""


class Study:
    """The same number of trials for every method; each method is a study in the journal.

    Args:
        folder: of all files; locked.
        options: of the command line.
        methods: to compare, inside `composing`.

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
        if not (folder / STUDY).exists() and {file.name for file in folder.iterdir()} - {LOCK, JOURNAL}:
            raise SettingsError(f"{folder} is not empty and has no {STUDY}; choose a new folder")
        before, now = dotted(read_study(folder)["plan"] if (folder / STUDY).exists() else self.plan), dotted(self.plan)
        if differing := [key for key in {**now, **before} if before.get(key) != now.get(key)]:
            raise SettingsError(f"{folder} has a study with another {', '.join(differing[:3])}; choose a new folder")
        storage = _open_journal(folder / JOURNAL)
        self.journal = {
            name: optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
            for name in self.plan["methods"]
        }

    def write(self) -> None:
        """Write the plan, and the chosen values so far."""
        chosen = {method.name: (best := self.chosen(method)) and best.params for method in self.methods}
        content = {"options": self.options, "plan": self.plan, "chosen": chosen}
        write_atomically(self.folder / STUDY, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def trials(self, method: Method) -> list[FrozenTrial]:
        """Return the trials of a method, in the order of their numbers; those that failed have the value 0."""
        return self.journal[method.name].trials

    def failed(self, method: Method) -> dict[int, str]:
        """Return why trials of a method failed, by number."""
        return {int(number): reason for number, reason in self.journal[method.name].user_attrs.items()}

    def chosen(self, method: Method) -> FrozenTrial | None:
        """Return the trial with the highest validation accuracy, the first one of equals; None if none has one."""
        failed = self.failed(method)
        ended = [one for one in self.trials(method) if one.value is not None and one.number not in failed]
        return max(ended, key=lambda one: one.value or 0.0, default=None)

    def final_runs(self) -> list[Settings]:
        """Return the settings of the chosen values with the seeds that no trial has used."""
        rounds = {"rounds": self.options["rounds"]} if self.options["rounds"] else {}
        return [
            method.settings(
                {**best.params, **rounds, "seed": seed, "run_dir": self._folder("runs", method, f"s{seed}")}
            )
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
        method, trial = self.asked[number]
        accuracy, best = 0.0, None
        if not failed:
            run = read_run(Path(self._folder("trials", method, f"{trial.number:03}")))
            if best := run.at("best_val"):
                accuracy = best.accuracy[run.reported._replace(split="val")].mean
        if best is None:
            failed = failed or "no client has validation examples"
            self.journal[method.name].set_user_attr(str(trial.number), failed)
        self.journal[method.name].tell(trial.number, accuracy)
        said = f"validation accuracy {accuracy:.4f} in round {best.round}" if best else f"failed: {failed}"
        ahead = f"; best {leader.value:.4f}" if (leader := self.chosen(method)) else ""
        return f"{method.name}: trial {trial.number + 1} of {self.budget}, {settings_text(trial.params)}: {said}{ahead}"


def read_study(folder: Path) -> Mapping[str, Any]:
    """Return the content of tuned.json.

    Raises:
        SettingsError: it is missing or damaged.
    """
    return read_mapping(folder / STUDY, json.loads, ("options", "plan"))


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
