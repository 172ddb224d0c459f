"""A study: the same number of trials for every method, then runs of the chosen values with other seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pflsim.analysis.results import read_run
from pflsim.analysis.results.run import read_mapping
from pflsim.commands.tune.methods import Method
from pflsim.commands.tune.space import as_plain
from pflsim.commands.tune.suggest import suggest
from pflsim.config.names import written
from pflsim.config.plain import dotted
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError
from pflsim.run_folder.environment import code
from pflsim.run_folder.files import write_atomically
from pflsim.run_folder.folder import LOCK, is_complete
from pflsim.run_folder.resume import fixed_settings
from pflsim.seeding import seed_for
from pflsim.terminal.result import result_line

STUDY = "tuned.json"
BATCH = 5
"""Trials of a method that are suggested at once, from the results of all earlier batches; results depend on it."""

Runs = Callable[[Sequence[Settings]], Iterator[tuple[int, str]]]
"""Runs or resumes settings; yields the number of each in the order of their ends, and why it failed, or ""."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial of a method.

    Args:
        method: its name.
        number: from 0, of the defaults.
        values: of the searched settings, by dotted key.
        accuracy: mean validation accuracy of the reported model in its best round; None until the end.
        round: that round.
        failed: why it failed.
    """

    method: str
    number: int
    values: Mapping[str, Any]
    accuracy: float | None = None
    round: int | None = None
    failed: str | None = None

    @property
    def ended(self) -> bool:
        """Whether it has a result or has failed."""
        return self.accuracy is not None or self.failed is not None


@dataclass(frozen=True, eq=False)
class Study:
    """What a study compares and how.

    Args:
        folder: of all its files.
        words: the settings on the command line.
        config_dirs: the other config folders on the command line.
        methods: to compare.
        budget: trials of each method.
        seed: of all trials.
        seeds: of the runs of the chosen values.
        rounds: of these runs; None: as many as the trials have.
    """

    folder: Path
    words: tuple[str, ...]
    config_dirs: tuple[str, ...]
    methods: tuple[Method, ...]
    budget: int
    seed: int
    seeds: tuple[int, ...]
    rounds: int | None = None

    @property
    def run_values(self) -> dict[str, Any]:
        """Settings that the runs of the chosen values have and the trials do not."""
        return {} if self.rounds is None else {"rounds": self.rounds}

    @cached_property
    def plan(self) -> dict[str, Any]:
        """What defines the results, as the file of the study has it."""
        found = {
            "trials": self.budget,
            "seed": self.seed,
            "seeds": list(self.seeds),
            "rounds": self.rounds,
            "batch": BATCH,
            "methods": [method.name for method in self.methods],
            "space": {m.name: {key: as_plain(found) for key, found in m.space.items()} for m in self.methods},
            "settings": {method.name: fixed_settings(method.settings({})) for method in self.methods},
        }
        return json.loads(json.dumps(found))

    @cached_property
    def code(self) -> list[dict[str, Any]]:
        """The commits of pflsim in the sessions of the study, see `pflsim.run_folder.environment.code`."""
        found = read_study(self.folder).get("code", []) if (self.folder / STUDY).exists() else []
        before = found if isinstance(found, list) else [found]  # of older versions: the last session's
        return before if (now := code()) in before else [*before, now]

    def trial_folder(self, trial: Trial) -> Path:
        """Return the run folder of a trial."""
        return self.folder / "trials" / f"{trial.method}-{trial.number:03}"

    def run_folder(self, method: str, seed: int) -> Path:
        """Return the folder of a run of the chosen values."""
        return self.folder / "runs" / f"{method}-s{seed}"

    def read(self) -> list[Trial]:
        """Return the trials of earlier sessions.

        Raises:
            SettingsError: the folder has another study, or other files.
        """
        if not (self.folder / STUDY).exists():
            if any(file.name != LOCK for file in self.folder.iterdir()):
                raise SettingsError(f"--into {self.folder} is not empty and has no {STUDY}; choose a new folder")
            return []
        saved = read_study(self.folder)
        before, now = map(dotted, (saved["plan"], self.plan))
        differing = [
            f"{key} was {written(before.get(key))} and is {written(now.get(key))}"
            for key in {**before, **now}
            # A version with a new setting has its default.
            if before.get(key) != now.get(key) and (not key.startswith("settings.") or (key in before and key in now))
        ]
        if differing:
            raise SettingsError(f"--into {self.folder} has another study; choose a new folder: {'; '.join(differing)}")
        return [Trial(**trial) for trial in saved["results"]]

    def write(self, trials: Sequence[Trial]) -> None:
        """Write the file of the study."""
        chosen = {name: trial and asdict(trial) for name, trial in self.chosen(trials).items()}
        content = {
            "command": {"words": self.words, "config_dirs": self.config_dirs},
            "plan": self.plan,
            "code": self.code,
            "chosen": chosen,
            "results": [asdict(trial) for trial in trials],
        }
        write_atomically(self.folder / STUDY, json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def chosen(self, trials: Sequence[Trial]) -> dict[str, Trial | None]:
        """Return the best trial of each method."""
        return {method.name: best(trial for trial in trials if trial.method == method.name) for method in self.methods}


def read_study(folder: Path) -> Mapping[str, Any]:
    """Return the file of a study.

    Raises:
        SettingsError: there is none, or it cannot be read.
    """
    if not (folder / STUDY).is_file():
        raise SettingsError(f"{folder} is no study: it has no {STUDY}")
    return read_mapping(folder / STUDY, json.loads, ("command", "plan", "results"))


def best(trials: Iterable[Trial]) -> Trial | None:
    """Return the trial with the highest validation accuracy, the first one of equals; None if none has one."""
    return max((one for one in trials if one.accuracy is not None), key=lambda one: one.accuracy or 0.0, default=None)


def run_trials(study: Study, trials: list[Trial], run: Runs) -> None:
    """Run the trials that have no result yet, batch by batch; results are added to the list and to the file.

    Args:
        study: inside `composing`.
        trials: of earlier sessions.
        run: runs settings.
    """
    for first in range(0, study.budget, BATCH):
        for method in study.methods:
            own = [trial for trial in trials if trial.method == method.name]
            if len(own) == first:  # fewer: its space is exhausted; more: an earlier session has suggested them
                trials += _batch(study, method, own)
        study.write(trials)
        _run_batch(study, trials, run)


def _batch(study: Study, method: Method, own: Sequence[Trial]) -> list[Trial]:
    """Return the next trials of a method; the very first is that of its defaults."""
    tried = [(trial.values, trial.accuracy or 0.0) for trial in own]  # a failure is the worst result
    points = [] if own else [method.defaults()]
    count = min(BATCH, study.budget - len(own)) - len(points)
    seed = seed_for(study.seed, f"tune {method.name}", round_number=len(own))
    points += suggest(method.space, [*tried, *((point, None) for point in points)], count, seed)
    return [Trial(method.name, len(own) + i, point) for i, point in enumerate(points)]


def _run_batch(study: Study, trials: list[Trial], run: Runs) -> None:
    by_name = {method.name: method for method in study.methods}
    due = [i for i, trial in enumerate(trials) if not trial.ended]
    runs = list[Settings]()
    for i in due:
        run_dir = str(study.trial_folder(trials[i]))
        runs.append(by_name[trials[i].method].settings({**trials[i].values, "run_dir": run_dir}))
    for number, reason in run(runs) if runs else ():
        i = due[number]
        trials[i] = _with_result(trials[i], study.trial_folder(trials[i]), reason)
        study.write(trials)
        print(_line(study, trials[i], best(t for t in trials if t.method == trials[i].method)), flush=True)


def _with_result(trial: Trial, folder: Path, reason: str) -> Trial:
    if reason:
        return replace(trial, failed=reason)
    run = read_run(folder)
    line = run.at("best_val")
    if line is None:
        return replace(trial, failed="no client has validation examples")
    return replace(trial, accuracy=line.accuracy[run.reported._replace(split="val")].mean, round=line.round)


def _line(study: Study, trial: Trial, leader: Trial | None) -> str:
    """Return the line that is printed when a trial ends."""
    values = "".join(f" {key}={written(value)}" for key, value in trial.values.items())
    found = (
        f"failed: {trial.failed}"
        if trial.failed
        else f"validation accuracy {trial.accuracy:.4f} in round {trial.round}"
    )
    ahead = "" if leader is None else f"; best {leader.accuracy:.4f}"
    return f"{trial.method}: trial {trial.number + 1} of {study.budget}{values and ','}{values}: {found}{ahead}"


def run_chosen(study: Study, trials: Sequence[Trial], run: Runs) -> tuple[list[Path], list[str]]:
    """Run the chosen values with the other seeds.

    Returns:
        The folders of the complete runs, and why others are missing.
    """
    runs, failed = list[Settings](), list[str]()
    for method in study.methods:
        trial = study.chosen(trials)[method.name]
        if trial is None:
            failed.append(f"{method.name}: all trials failed, so it has no runs")
            continue
        for seed in study.seeds:
            own = {**study.run_values, "seed": seed, "run_dir": str(study.run_folder(method.name, seed))}
            runs.append(method.settings({**trial.values, **own}))
    for number, reason in run(runs) if runs else ():
        folder = Path(str(runs[number].run_dir))
        print(f"{folder.name}: {reason or result_line(folder)}", flush=True)
        failed += [f"{folder}: {reason}"] if reason else []
    return [folder for settings in runs if is_complete(folder := Path(str(settings.run_dir)))], failed
