"""What a page says besides figures: traffic, settings, what went wrong, and how it was run."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from pflsim.analysis.compare.rows import row
from pflsim.analysis.report.rows import Value, value_of
from pflsim.analysis.results import Run
from pflsim.analysis.results.groups import Group
from pflsim.analysis.results.settings import run_settings, written
from pflsim.config.components import COMPONENTS
from pflsim.config.plain import dotted
from pflsim.config.settings import Settings
from pflsim.run_folder.summary import Choice

OWN = ("seed", "names", "run_dir")
"""Settings that are said elsewhere."""


@dataclass(frozen=True, slots=True)
class Communication:
    """A group's bytes, up and down.

    Args:
        group: the runs.
        client: of a client in a round, mean over rounds and seeds; an opening is no round.
        round: of all clients in a round, likewise.
        headline: of all clients until the headline's round, openings included; None where a run has none.
        total: the same of all rounds.
        target: both ways until a mean accuracy is reached; None where a run does not reach it.
    """

    group: Group
    client: tuple[Value, Value]
    round: tuple[Value, Value]
    headline: tuple[Value, Value] | None
    total: tuple[Value, Value]
    target: Value | None


def communication(group: Group, choice: Choice, target: float | None = None) -> Communication:
    """Work out a group's traffic from the lines of metrics.jsonl."""
    per_client, per_round, headline, totals = [], [], [], []
    for run in group.runs:
        rounds = [line for line in run.history if line.round > 0]
        both = [(line.traffic.up_bytes, line.traffic.down_bytes) for line in rounds]
        took_part = sum(line.cohort for line in rounds)
        sums = [sum(each[way] for each in both) for way in (0, 1)]
        per_client.append([x / took_part if took_part else 0.0 for x in sums])
        per_round.append([x / len(rounds) if rounds else 0.0 for x in sums])
        last, chosen = run.history[-1].traffic_total, run.at(choice)
        totals.append([last.up_bytes, last.down_bytes])
        if chosen is not None:
            headline.append([chosen.traffic_total.up_bytes, chosen.traffic_total.down_bytes])
    until = _both(headline) if len(headline) == len(group.runs) else None
    reached = row(group, choice, target).bytes_to_target
    aim = None if reached is None else value_of(reached.values)
    return Communication(group, _both(per_client), _both(per_round), until, _both(totals), aim)


def _both(pairs: Sequence[Sequence[float]]) -> tuple[Value, Value]:
    return value_of([up for up, _ in pairs]), value_of([down for _, down in pairs])


def settings_table(groups: Sequence[Group]) -> list[tuple[str, list[str], bool]]:
    """Settings by key with every group's value, and whether they differ: names of parts, and what is not the default.

    First those that differ, then the parts, then the others.
    """
    default = dotted({key: value for key, value in asdict(Settings()).items() if key not in COMPONENTS}) | {
        "local_epochs": 1
    }
    each = [run_settings(group.runs[0]) for group in groups]
    rows = []
    for key in dict.fromkeys(key for found in each for key in found):
        values = [written(found[key]) if key in found else "" for found in each]
        differ = len(set(values)) > 1
        part = key.partition(".")[0] in COMPONENTS
        if "_target_" in key or not (differ or part or any(v != written(default.get(key)) for v in values)):
            continue
        rows.append((key, values, differ))
    return sorted(rows, key=lambda line: (not line[2], line[0] not in COMPONENTS))


@dataclass(frozen=True, slots=True)
class Environment:
    """What sessions ran on, and the runs that did."""

    versions: Mapping[str, Any]
    commit: str | None
    dirty: bool | None
    machine: Mapping[str, Any]
    runs: tuple[str, ...]


def environments(runs: Iterable[Run]) -> list[Environment]:
    """The different environments of all sessions, each once, in order of their first appearance."""
    found: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for run in runs:
        for session in sessions(run):
            about = {key: session.get(key) or {} for key in ("versions", "code", "machine")}
            about["code"] = {"commit": about["code"].get("commit"), "dirty": about["code"].get("dirty")}
            entry = found.setdefault(json.dumps(about, sort_keys=True), (about, []))
            if run.name not in entry[1]:
                entry[1].append(run.name)
    return [
        Environment(a["versions"], a["code"]["commit"], a["code"]["dirty"], a["machine"], tuple(names))
        for a, names in found.values()
    ]


def sessions(run: Run) -> list[Mapping[str, Any]]:
    """environment.json and those of later sessions, in their order; what cannot be read is left out."""
    found = [run.environment] if run.environment else []
    later = [path for path in run.folder.glob("environment-*.json") if path.stem.partition("-")[2].isdigit()]
    for path in sorted(later, key=lambda path: int(path.stem.partition("-")[2])):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, Mapping):
            found.append(content)
    return found


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, the commit it was run at, and the runs that it made."""

    line: str
    commit: str | None
    dirty: bool | None
    runs: tuple[str, ...]


def commands(runs: Iterable[Run]) -> list[Command]:
    """The commands that made the runs, each once; those of later sessions are not among them."""
    found: dict[tuple[str, str | None, bool | None], list[str]] = {}
    for run in runs:
        arguments, code = run.environment.get("command"), run.environment.get("code") or {}
        line = command_line(arguments) if arguments else ""
        found.setdefault((line, code.get("commit"), code.get("dirty")), []).append(run.name)
    return [Command(*key, tuple(names)) for key, names in found.items()]


def command_line(arguments: Sequence[str]) -> str:
    """What to type: `python launch.py …`, quoted for a shell."""
    program = PurePath(arguments[0])
    first = program.name if program.name == "launch.py" else str(program)
    return shlex.join(["python", first, *arguments[1:]])


def incidents(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Of every run that something befell: what."""
    found = []
    for run in (run for group in groups for run in group.runs):
        said = list(_incidents(run))
        if said:
            found.append((run.name, said))
    return found


def _incidents(run: Run) -> Iterable[str]:
    summary = run.summary
    if not run.complete:
        yield (
            f"not complete: {run.done} of {summary['rounds_planned']} rounds are done; "
            "all of its figures are of these rounds"
        )
    after = summary.get("resumed_after") or []
    if after:
        yield f"taken up again after round {', '.join(map(str, after))}"
    faults = sum((Counter(line.faults) for line in run.history), Counter())
    if faults:
        work = sum(line.cohort for line in run.history)
        words = [f"{count} of {work} times {FAULTS.get(kind, kind)}" for kind, count in faults.items()]
        yield f"clients: {'; '.join(words)}"
    restarts = summary.get("actor_restarts", 0)
    if restarts:
        yield f"{restarts} actor{'' if restarts == 1 else 's'} died and {'was' if restarts == 1 else 'were'} replaced"


FAULTS = {
    "dropout": "absent (simulated)",
    "straggler": "slow, with a share of the work done (simulated)",
    "error": "left out after an error",
    "nonfinite": "with values that are not finite",
}
