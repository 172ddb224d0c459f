"""The tuning that chose the settings of the runs: the records of `pflsim tune`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from pflsim.analysis.runs import find_runs, read_run, run_settings
from pflsim.analysis.words import edges_of
from pflsim.config.names import written
from pflsim.records.files import keys, read_json
from pflsim.terminal.identity import Identity, identity

STUDY = "tuned.json"


@dataclass(frozen=True)
class Tuned:
    """The trials of a method.

    Args:
        who: the method.
        trials: settings and validation score of each trial that ended, in order.
        best: the best score up to each trial.
        chosen: the settings of the best trial.
        space: what was searched, by setting.
        edges: settings whose chosen value is at an end of what was searched.
    """

    who: Identity
    trials: list[tuple[str, float]]
    best: list[float]
    chosen: str
    space: str
    edges: list[str]


@dataclass(frozen=True)
class Study:
    """A study.

    Args:
        budget: trials of each method.
        metric: the primary metric.
        methods: the methods.
    """

    budget: int
    metric: str
    methods: list[Tuned]


def read_study(folder: Path) -> Study:
    """Read the folder of a study.

    Raises:
        SettingsError: a file cannot be read.
    """
    content = read_json(folder / STUDY, keys({"plan": Mapping[str, Any], "chosen": Mapping[str, Any]}))
    plan, found, metric, higher = content["plan"], list[Tuned](), "", True
    for name in plan["methods"]:
        trials, space = list[tuple[str, float]](), plan["space"][name]
        folders = sorted((folder / "trials").glob(f"{name}-*"))
        for run in map(read_run, find_runs([str(path) for path in folders]) if folders else ()):
            metric, line = run.primary, run.at("best_val")
            if run.complete and line:
                settings = run_settings(run)
                text = _text({key: settings[key] for key in space})
                trials.append((text, line.evaluations[run.reported._replace(split="val")].mean))
                higher = run.higher
        best = list(accumulate((score for _, score in trials), max if higher else min))
        chosen = content["chosen"].get(name) or {}
        edges = [key.removeprefix("method.") for key in edges_of(chosen, space)]
        found.append(Tuned(identity(name), trials, best, _text(chosen), _text(space), edges))
    return Study(plan["trials"], metric, found)


def _text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.removeprefix('method.')}={written(value)}" for key, value in values.items()) or "nothing"
