"""The tables and lists of a report besides accuracy: settings, incidents, environment, commands, and tuning."""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from pflsim.analysis.differences import client_values
from pflsim.analysis.groups import Group
from pflsim.analysis.headings import edges_of
from pflsim.analysis.report.structure import client_name
from pflsim.analysis.runs import NEWER, Run, find_runs, read_run, run_settings
from pflsim.analysis.tables import numbers
from pflsim.analysis.verdict import MAX_NAMES
from pflsim.config.components import COMPONENTS, TARGET
from pflsim.config.names import listed, started_as, written
from pflsim.config.settings import Settings, dotted
from pflsim.display.formats import plural
from pflsim.display.identity import Identity, identity
from pflsim.records.environment import read_sessions
from pflsim.records.evaluation import grouped
from pflsim.records.files import keys, read_json

STUDY = "tuned.json"
ALWAYS = ("clients", "rounds", "lr", "batch_size", "local_epochs", "local_steps")


def settings_table(groups: Sequence[Group]) -> list[tuple[str, list[str], bool]]:
    """Return (key, each group's value, whether they differ) for components, their settings, and `ALWAYS`.

    Other settings are left out if all groups have the default. Settings that differ come first, then the components,
    then the others.
    """
    default = {**dotted({k: v for k, v in asdict(Settings()).items() if k not in COMPONENTS}), "local_epochs": 1}
    runs = [group.runs[0] for group in groups]
    each = [*map(run_settings, runs)]
    rows = []
    for key in dict.fromkeys(key for found in each for key in found):
        values = [written(found[key]) if found.get(key) not in (None, []) else "" for found in each]
        differ = len(set(values)) > 1
        part = key.partition(".")[0]
        if part in NEWER and all(run.config[part].get(TARGET) == getattr(Settings(), part)[TARGET] for run in runs):
            continue  # no run uses it
        own = part in COMPONENTS or key in ALWAYS
        if any(values) and "_target_" not in key and (differ or own or values[0] != written(default.get(key))):
            rows.append((key, values, differ))
    return sorted(rows, key=lambda line: (not line[2], line[0] not in COMPONENTS))


def by_component(table: Sequence[tuple[str, list[str], bool]]) -> dict[str, list[tuple[str, str]]]:
    """Return the settings of a `settings_table` that do not differ: (key within the component, value), by component."""
    same = [(key.partition("."), values[0]) for key, values, differ in table if not differ]
    return grouped((component, (key, value)) for (component, _, key), value in same)


def card(run: Run) -> dict[str, str]:
    """Return what was read, from data_card.json; {} if the run has none."""
    path = run.folder / "data_card.json"
    return read_json(path, keys({"card": dict[str, str]}))["card"] if path.is_file() else {}


def environments(runs: Iterable[Run]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the different environments of all sessions, each with the names of its runs.

    An environment has the keys versions, commit, dirty, and machine.
    """
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for session in read_sessions(run.folder):
            code = {key: session["code"].get(key) for key in ("commit", "dirty")}
            about = {"versions": session["versions"], "machine": session["machine"], **code}
            found.setdefault(json.dumps(about, sort_keys=True), {})[run.name] = None
    return [(json.loads(about), [*names]) for about, names in found.items()]


def commands(runs: Iterable[Run]) -> list[tuple[str, str | None, bool | None, list[str]]]:
    """Return (command line, git commit, uncommitted changes, names of runs) of the runs' first sessions."""
    each = [(run.name, run.environment["command"], run.environment["code"]) for run in runs]
    found = grouped(((command_line(line), code.get("commit"), code.get("dirty")), name) for name, line, code in each)
    return [(*key, names) for key, names in found.items()]


def command_line(arguments: Sequence[str]) -> str:
    """Return the shell command of a run: `pflsim …`, or `python …` with the script that called it."""
    if not arguments:
        return ""
    first = started_as(arguments[0]) or f"python {shlex.quote(arguments[0])}"
    return " ".join([first, *map(shlex.quote, arguments[1:])])


def warnings(runs: Iterable[Run]) -> list[str]:
    """Return the different warnings of runs, each with the methods and the seeds that have it.

    Of warnings that differ in their numbers only, the first is returned.
    """
    found = ((run, text) for run in runs for text in (*run.summary.get("warnings", ()), *_diverged(run)))
    each = [(run, text.removeprefix(f"{run.method} ")) for run, text in found]
    said = []
    for having in grouped((re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "0", text), (run, text)) for run, text in each).values():
        (first, text), texts = having[0], {each for _, each in having}
        who = dict.fromkeys(identity(run.method).display for run, _ in having)
        seeds = sorted({run.seed for run, _ in having})
        whose = f"{listed([*who])}, seed{'s' * (len(seeds) > 1)} {numbers(seeds)}"
        of = f" (the numbers are those of {identity(first.method).display}, seed {first.seed})" * (len(texts) > 1)
        said.append(f"{whose}: {text}{of}")
    return said


def warned(runs: Iterable[Run]) -> set[str]:
    """Return the methods of runs with warnings; none if all methods have some."""
    methods = {run.method for run in runs}
    found = {run.method for run in runs if run.summary.get("warnings") or any(_diverged(run))}
    return found if found < methods else set()


def _diverged(run: Run) -> Iterator[str]:
    """Yield a sentence about clients whose loss is not finite, or above 10 and above ten times the median."""
    losses = client_values(run, "last").eval("loss / total")
    if clients := losses[~(losses <= 10 * max(1.0, losses.replace(math.inf, math.nan).median()))].index.tolist():
        names = [client_name(run.partition.get("names", ()), client) for client in clients[:MAX_NAMES]]
        who = f"{plural(len(clients), 'client')} ({', '.join(names)}{', …' * (len(clients) > MAX_NAMES)})"
        lost = "is not finite" if not np.isfinite(losses[clients]).any() else "is over ten times the median client's"
        yield f"in the last round, the test loss of {who} {lost}"


def incidents(runs: Iterable[Run]) -> list[tuple[str, list[str]]]:
    """Return the name of every run with incidents, and what they were."""
    found = [(run.name, list(_incidents(run))) for run in runs]
    return [(name, lines) for name, lines in found if lines]


def _incidents(run: Run) -> Iterator[str]:
    if not run.complete:
        yield f"not complete: {run.done} of {run.summary['rounds_planned']} rounds are done"
    if after := run.summary.get("resumed_after"):
        yield f"resumed after round {', '.join(map(str, after))}"
    if changed := [name for name, digest in run.own_code.items() if "+" in digest]:
        yield f"resumed with other code: {', '.join(changed)}"
    work = sum(line.cohort for line in run.history)
    for kind, count in sum((Counter(line.faults) for line in run.history), Counter()).items():
        yield f"clients with the fault {kind}: {count} of {work}"
    if restarts := run.summary.get("actor_restarts", 0):
        yield f"restarts of dead actors: {restarts}"


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
                text = _values_text({key: settings[key] for key in space})
                trials.append((text, line.evaluations[run.reported._replace(split="val")].mean))
                higher = run.higher
        best = list(accumulate((score for _, score in trials), max if higher else min))
        chosen = content["chosen"].get(name) or {}
        edges = [key.removeprefix("method.") for key in edges_of(chosen, space)]
        found.append(Tuned(identity(name), trials, best, _values_text(chosen), _values_text(space), edges))
    return Study(plan["trials"], metric, found)


def _values_text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.removeprefix('method.')}={written(value)}" for key, value in values.items()) or "nothing"
