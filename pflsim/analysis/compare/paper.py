"""Runs of an experiment beside what its paper has printed, under the paper's own protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pflsim.analysis.compare.planned import Planned, planned
from pflsim.analysis.compare.published import CONFIGS, Published, PublishedRow, read_published
from pflsim.analysis.compare.rows import Spread
from pflsim.analysis.compare.tables import NONE, Table
from pflsim.analysis.compare.words import numbers
from pflsim.analysis.results import Run
from pflsim.analysis.results.settings import run_settings, written
from pflsim.config.components import COMPONENTS
from pflsim.run_folder.summary import Choice

ROUNDS: dict[Choice, str] = {
    "last": "the last",
    "best_val": "each seed's best by mean validation accuracy",
    "best_test_oracle": "each seed's best by mean test accuracy, an ORACLE's choice, as the paper's is taken to be",
}
FREE = ("eval.every", "lockstep", "lockstep_clients")
"""What a run may have otherwise: how often it looks (told where the oracle has fewer rounds to choose from), and how
its results are rounded."""
MOST = 4
"""How many differences of a run are named."""

BySeed = dict[int, Run]


@dataclass(frozen=True, slots=True)
class Beside:
    """A paper's figures with ours beside them.

    Args:
        table: in percent; without rows there is nothing to compare with.
        missing: for rows without a run, the command that would make it and the rows it is for.
    """

    table: Table
    missing: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class _Row:
    """A row of the paper, and the runs there are of it: those of its settings, and others by what differs."""

    published: PublishedRow
    plan: Planned
    settings: Mapping[str, Any]
    runs: BySeed = field(default_factory=dict)
    deviating: dict[tuple[str, ...], BySeed] = field(default_factory=dict)


def paper_table(name: str, runs: Sequence[Run], anyway: bool = False, configs: Path = CONFIGS) -> Beside:
    """An experiment's runs beside the paper's figures, in percent.

    Args:
        name: of the experiment.
        runs: all there are; those of other experiments are passed over. Of several with one seed the last counts.
        anyway: also show runs that deviate from the experiment's settings, in lines of their own.
        configs: the folder of all groups.

    Raises:
        SettingsError: there is no such experiment.
    """
    published = read_published(name, configs)
    plans = [planned(row.experiment or name, row.settings, configs) for row in published.rows]
    rows = [_Row(row, plan, plan.settings()) for row, plan in zip(published.rows, plans, strict=True)]
    experiments = {name, *(plan.experiment for plan in plans)}
    replaced = [before for run in runs if (before := _placed(run, rows, experiments))]
    cells: list[tuple[str, ...]] = []
    for row in rows:
        cells.append(_cells(row.published.label, row.published, published, row.runs))
        for why, found in row.deviating.items() if anyway else ():
            cells.append(_cells(f"{row.published.label}; {_named(why)}", row.published, published, found))
    notes = [
        *_protocol(published, rows),
        *(f"left out, since a later run with these settings and this seed says the same: {r.folder}" for r in replaced),
        *_unused(rows, anyway),
    ]
    figures = "paper\n(~ by eye)" if any(row.read_from_figure for row in published.rows) else "paper"
    headers = ("row", figures, "ours", "difference", "round\n(oracle)" if _oracle(published) else "round", "seeds")
    return Beside(Table(f"{published.paper}; {published.where}", headers, tuple(cells), tuple(notes)), _missing(rows))


def differences(own: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What a run has instead of what is wanted: `rounds=20 instead of 100`.

    Of a part that is another altogether the name alone is told.
    """
    others = {part for part in COMPONENTS if own.get(part) != wanted[part]}
    found: list[str] = []
    for key in sorted(wanted, key=lambda key: (key not in COMPONENTS, "." in key, key)):
        of_another = "." in key and key.partition(".")[0] in others
        if key not in FREE and not of_another and (key not in own or own[key] != wanted[key]):
            found.append(f"{key}={written(own.get(key))} instead of {written(wanted[key])}")
    return found


def _placed(run: Run, rows: Sequence[_Row], experiments: set[str]) -> Run | None:
    """Give a run to the rows that it is of, or else, where it was made for this experiment, to the nearest as one that
    deviates; returns the run whose place it takes.
    """
    own, names = run_settings(run), run.config.get("names") or {}
    unlike = [differences(own, row.settings) for row in rows]
    least = min((len(found) for found in unlike), default=0)
    if least and names.get("experiment") not in experiments:
        return None
    short = () if run.complete else (f"stopped after round {run.summary['rounds']} of {run.config['rounds']}",)
    before = None
    for row, found in zip(rows, unlike, strict=True):
        if len(found) == least:
            why = (*short, *found)
            held = row.deviating.setdefault(why, {}) if why else row.runs
            before = held.get(run.seed, before)
            held[run.seed] = run
    return before


def _cells(label: str, row: PublishedRow, published: Published, runs: Mapping[int, Run]) -> tuple[str, ...]:
    scale, model = published.scale, None if row.model == "judged" else row.model
    told = ("~" if row.read_from_figure else "") + _spread(row.value * scale, row.std and row.std * scale)
    found = {seed: (run.at(published.round, model), run.stats(published.round, model)) for seed, run in runs.items()}
    there = {seed: (line.round, stats) for seed, (line, stats) in sorted(found.items()) if line and stats}
    if not there:
        return (label, told, NONE, NONE, NONE, NONE)
    spread = Spread(tuple(100 * getattr(stats, published.average) for _, stats in there.values()))
    rounds = sorted({number for number, _ in there.values()})
    between = str(rounds[0]) if len(rounds) == 1 else f"{rounds[0]}–{rounds[-1]}"
    ours = _spread(spread.mean, spread.std)
    return (label, told, ours, f"{spread.mean - row.value * scale:+.2f}", between, numbers(list(there)))


def _spread(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def _oracle(published: Published) -> bool:
    return published.round == "best_test_oracle"


def _protocol(published: Published, rows: Sequence[_Row]) -> Iterator[str]:
    """What the figures are."""
    if not published.rows:
        yield "there is nothing to compare with"
    else:
        weights = ", weighted by their test examples" if published.average == "weighted_mean" else ""
        yield f"accuracy in percent: mean over clients{weights}, of the model that a method is judged by or a row names"
        yield f"round: {ROUNDS[published.round]}"
    used = {run.folder: run for row in rows for run in row.runs.values()}
    if any(len(row.runs) > 1 for row in rows):
        yield "± of ours: sample standard deviation over seeds"
    every = {run.folder.name: run_settings(run)["eval.every"] for run in used.values()}
    if _oracle(published) and max(every.values(), default=1) > 1:
        seen = ", ".join(f"{name}: every {n} rounds" for name, n in every.items() if n > 1)
        yield f"of ours fewer rounds are there to choose from ({seen})"
    yield from published.notes


def _unused(rows: Sequence[_Row], anyway: bool) -> Iterator[str]:
    """Runs of the experiment that are not what the paper's were."""
    told = {run.folder: (run, why) for row in rows for why, found in row.deviating.items() for run in found.values()}
    quick = all("quick" in (run.config.get("names") or {}) for run, _ in told.values())
    if told and not any(row.runs for row in rows) and quick:
        yield "all runs there are were made with +quick, which is smaller than the paper's experiment"
    for folder, (_, why) in told.items():
        yield f"{'not the setting of the paper' if anyway else 'not used (--anyway shows it)'}: {folder}: {_named(why)}"


def _missing(rows: Sequence[_Row]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    labels: dict[str, tuple[str, ...]] = {}
    for row in rows:
        if not row.runs:
            command = row.plan.command()
            labels[command] = (*labels.get(command, ()), row.published.label)
    return tuple(labels.items())


def _named(why: Sequence[str]) -> str:
    more = f", and {len(why) - MOST} more" if len(why) > MOST else ""
    return ", ".join(why[:MOST]) + more
