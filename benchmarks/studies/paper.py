"""Puts runs beside the values that a paper prints: `python -m benchmarks.studies.paper EXPERIMENT [RUNS...]`.

The values are in the files `configs/experiment/TABLE.toml`:

paper = "authors, year, title"
round = "best_test_oracle"      # the round that the paper reports: best_test_oracle, best_val or last
notes = ["..."]                 # shown below the table

[EXPERIMENT]
where = "Table 1, MNIST"
notes = ["..."]                 # of this experiment alone
rows = [
  {label = "FedAvg", value = 87.25, std = 0.5, model = "global", command = "+experiment=EXPERIMENT method=fedavg"},
]

Values are in percent. `model` is `personal` or `global`; a row without it has the method's reported model. `command`
holds the overrides that make the run, without `data.root`.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pflsim.analysis.comparison import Spread
from pflsim.analysis.runs import Run, find_runs, read_run, run_settings, settings_by_key
from pflsim.analysis.tables import CHOSEN, NONE, Format, Table, as_csv, drawn, format_of, numbers, span
from pflsim.config.components import COMPONENTS
from pflsim.config.compose import CONFIGS, composed, parse, to_settings
from pflsim.config.names import nearest, program, written
from pflsim.display.formats import Choice
from pflsim.errors import SettingsError
from pflsim.records.evaluation import Scope
from pflsim.records.summary import chosen_round
from pflsim.terminal.exit_status import exit_status
from pflsim.types import EvalPhase, ModelKind

IRRELEVANT = ("eval.every", "lockstep", "lockstep_clients")
"""Settings that may differ from the row's: they change which rounds are evaluated, or the last bits of a result."""
PHASES: tuple[EvalPhase, ...] = ("received", "trained")
MAX_DIFFERENCES = 4
"""How many differences between a run and its row a note names."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One value of a paper; `value` and `std` are in percent. See the module."""

    label: str
    value: float
    command: str
    std: float | None = None
    model: ModelKind | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """The values that a paper prints for one experiment. See the module."""

    title: str
    round: Choice
    rows: tuple[PublishedRow, ...]
    notes: tuple[str, ...]


def read_published(name: str, configs: Path = CONFIGS) -> Published:
    """Read the values that a paper prints for an experiment.

    Raises:
        SettingsError: there are none; names the experiments that have some.
    """
    known: list[str] = []
    for path in sorted((configs / "experiment").glob("*.toml")):
        file = tomllib.loads(path.read_text(encoding="utf-8"))
        if name in file and isinstance(file[name], dict):
            section = file[name]
            notes, rows = (*file.get("notes", []), *section.get("notes", [])), section["rows"]
            title = f"{file['paper']}; {section['where']}"
            return Published(title, file["round"], tuple(PublishedRow(**row) for row in rows), notes)
        known += [key for key, value in file.items() if isinstance(value, dict)]
    raise SettingsError(f"{name}: no paper prints values for such an experiment; {nearest(name, known)}")


@dataclass(frozen=True, slots=True)
class PaperTable:
    """A paper's values beside ours.

    Args:
        table: in percent.
        deviations: what differs from the paper's settings, by row of the table.
        missing: the labels of rows without a run with the settings of the paper, by the command that makes it.
    """

    table: Table
    deviations: Sequence[Sequence[str]]
    missing: Mapping[str, Sequence[str]]


@dataclass
class _Row:
    """A row of the paper and its runs by seed. `deviating` has runs with other settings, by what differs."""

    published: PublishedRow
    runs: dict[int, Run] = field(default_factory=dict)
    deviating: dict[tuple[str, ...], dict[int, Run]] = field(default_factory=dict)


def paper_table(name: str, runs: Sequence[Run], configs: Path = CONFIGS) -> PaperTable:
    """Put runs beside the values that the paper of an experiment prints.

    A run belongs to the rows whose settings it has. Runs of the experiment with other settings have lines of their own
    below the nearest row of their method; what several such lines have in common is a note. Of several runs with one
    seed the last one counts.

    Args:
        name: the experiment.
        runs: runs of this and of other experiments.
        configs: the folder of config.yaml.

    Raises:
        SettingsError: the experiment has no printed values.
    """
    published = read_published(name, configs)
    rows = [_Row(row) for row in published.rows]
    unused = _assign(runs, rows, settings_of_rows(published.rows, configs), name) if runs else {}
    cells, deviations = list[tuple[str, ...]](), list[Sequence[str]]()
    missing: dict[str, list[str]] = {}
    used = [found for row in rows for found in (row.runs, *row.deviating.values())]
    both = any((run.config.get("eval") or {}).get("received") for found in used for run in found.values())
    shared = _shared([why for row in rows for why in row.deviating])
    for row in rows:
        if row.runs or not row.deviating:
            cells.append(_cells(row.published.label, row.published, published.round, row.runs, both))
            deviations.append(())
        for why, found in row.deviating.items():
            own = _joined([difference for difference in why if difference not in shared])
            label = "; ".join(filter(None, [row.published.label + " *" * bool(shared), own]))
            cells.append(_cells(label, row.published, published.round, found, both))
            deviations.append(why)
        if not row.runs:
            command = f"{program()} {row.published.command} data.root=DIR"
            missing.setdefault(command, []).append(row.published.label)
    starred = [f"* with {', '.join(shared)}"] if shared else []
    notes = (
        *starred,
        *_notes(published, used, both),
        *(f"not used: {folder}: {why}" for folder, why in unused.items()),
    )
    oracle = "\n(oracle)" * (published.round == "best_test_oracle")
    headers = ("row", "paper", "ours", "difference", *(PHASES if both else ()), f"round{oracle}", "seeds")
    return PaperTable(Table(published.title, headers, tuple(cells), notes), deviations, missing)


def render_paper(found: PaperTable, kind: Format) -> str:
    """Return the table as text, Markdown, LaTeX or CSV.

    The first two list the commands for rows without a run; CSV has a column for all that differs from the paper.
    """
    if kind == "csv":
        headers = [header.replace("\n", " ") for header in found.table.headers]
        rows = [dict(zip(headers, row, strict=True)) for row in found.table.rows]
        return as_csv(
            [{**row, "other settings": ", ".join(why)} for row, why in zip(rows, found.deviations, strict=True)]
        )
    lines = [drawn([found.table], kind)]
    if found.missing and kind != "latex":
        fence = ["```"] if kind == "markdown" else []
        commands = [line for command, labels in found.missing.items() for line in (f"# {'; '.join(labels)}", command)]
        lines += ["", "rows without a run with the settings of the paper:", *fence, *commands, *fence]
    return "\n".join(lines)


def differences(own: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return which settings of a run are not as wanted: `rounds=20 instead of 100`.

    A component that is another one is named without its own settings.
    """
    others = {part for part in COMPONENTS if own.get(part) != wanted[part]}
    found: list[str] = []
    for key in sorted(wanted, key=lambda key: (key not in COMPONENTS, "." in key, key)):
        of_another = "." in key and key.partition(".")[0] in others
        if key not in IRRELEVANT and not of_another and (key not in own or own[key] != wanted[key]):
            found.append(f"{key}={written(own.get(key))} instead of {written(wanted[key])}")
    return found


@cache
def settings_of_rows(rows: tuple[PublishedRow, ...], configs: Path = CONFIGS) -> list[dict[str, Any]]:
    """Return the settings of each row's command by dotted key, as `run_settings` returns those of a run."""
    found = [to_settings(composed(parse(shlex.split(row.command)), [configs])) for row in rows]
    return [settings_by_key(asdict(settings), settings.names) for settings in found]


def _assign(
    runs: Sequence[Run], rows: Sequence[_Row], wanted: Sequence[Mapping[str, Any]], name: str
) -> dict[Path, str]:
    """Add each run to the rows whose settings are nearest to its own; return why runs of the experiment are not used.

    Runs that match no row are skipped unless they belong to the experiment.
    """
    experiments = {name, *re.findall(r"\+experiment=(\w+)", " ".join(row.published.command for row in rows))}
    unused: dict[Path, str] = {}
    for run in runs:
        own, names = run_settings(run), run.config.get("names") or {}
        unlike = [differences(own, settings) for settings in wanted]
        ranks = [
            (own["method"] != settings["method"], len(found)) for settings, found in zip(wanted, unlike, strict=True)
        ]
        nearest_row = min(ranks)
        if nearest_row[1] and names.get("experiment") not in experiments:
            continue
        if nearest_row[0]:
            unused[run.folder] = f"the paper's table has no method={own['method']}"
            continue
        stopped = [] if run.complete else [f"stopped after round {run.done} of {run.config['rounds']}"]
        for row, rank, found in zip(rows, ranks, unlike, strict=True):
            if rank == nearest_row:
                why = (*stopped, *found)
                by_seed = row.deviating.setdefault(why, {}) if why else row.runs
                if run.seed in by_seed:
                    unused[by_seed[run.seed].folder] = "replaced by a later run"
                by_seed[run.seed] = run
    return unused


def _cells(label: str, row: PublishedRow, choice: Choice, runs: Mapping[int, Run], both: bool) -> tuple[str, ...]:
    scopes = {seed: run.scope(row.model) for seed, run in sorted(runs.items())}
    chosen = {seed: chosen_round(runs[seed].history, s, choice) for seed, s in scopes.items()}
    lines = {seed: line for seed, line in chosen.items() if line}
    paper = _spread(row.value, row.std)
    if not lines:
        return (label, paper, *[NONE] * (4 + both * len(PHASES)))

    def percent(of: Mapping[int, Scope]) -> Spread | None:
        """Return the accuracy of the lines that have it."""
        found = [100 * line.evaluations[of[seed]].mean for seed, line in lines.items() if of[seed] in line.evaluations]
        return Spread(tuple(found)) if found else None

    ours = percent(scopes)
    assert ours is not None
    phases = [percent({seed: scope._replace(phase=phase) for seed, scope in scopes.items()}) for phase in PHASES]
    shown = [NONE if phase is None else _spread(phase.mean, phase.std) for phase in phases if both]
    difference = f"{ours.mean - row.value:+.2f}"
    rounds = span([line.round for line in lines.values()])
    return (label, paper, _spread(ours.mean, ours.std), difference, *shown, rounds, numbers([*lines]))


def _spread(mean: float, std: float | None) -> str:
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def _notes(published: Published, used: Sequence[Mapping[int, Run]], both: bool) -> Iterator[str]:
    """Yield what the values are; `used` holds the runs of each line by seed."""
    yield "accuracy in percent: mean over clients, of the method's reported model or the one that the row names"
    yield f"round: {CHOSEN[published.round]}"
    if both:
        yield "received, trained: the same model in the same round, before and after local training"
    if any(len(runs) > 1 for runs in used):
        yield "± of ours: sample standard deviation over seeds"
    every = {run.folder.name: run_settings(run)["eval.every"] for runs in used for run in runs.values()}
    sparse = ", ".join(f"{name}: every {n} rounds" for name, n in every.items() if n > 1)
    if published.round == "best_test_oracle" and sparse:
        yield f"ours chooses among evaluated rounds only ({sparse})"
    yield from published.notes


def _shared(deviations: Sequence[Sequence[str]]) -> list[str]:
    """Return the differences that all lines with other settings have, if there are several such lines."""
    if len(deviations) < 2:
        return []
    return [difference for difference in deviations[0] if all(difference in why for why in deviations)]


def _joined(why: Sequence[str]) -> str:
    more = f", and {len(why) - MAX_DIFFERENCES} more" if len(why) > MAX_DIFFERENCES else ""
    return ", ".join(why[:MAX_DIFFERENCES]) + more


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of an experiment; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.paper", allow_abbrev=False)
    parser.add_argument("experiment", metavar="NAME", help="of configs/experiment/")
    parser.add_argument(
        "runs", nargs="*", metavar="RUNS", help="run folders, folders of runs or patterns; default: runs"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=".txt, .md, .tex or .csv; default: standard output")
    given = parser.parse_args(arguments)
    return exit_status(lambda: _print(given.experiment, given.runs, given.out))


def _print(name: str, chosen: Sequence[str], out: Path | None) -> None:
    runs = []
    for folder in find_runs(chosen) if chosen else find_runs(["runs"]) if any(Path("runs").glob("*/*")) else []:
        try:
            runs.append(read_run(folder))
        except SettingsError as error:  # the others are compared
            print(f"warning: {error}", file=sys.stderr)
    rendered = render_paper(paper_table(name, runs), format_of(out))
    if out:
        out.write_text(rendered + "\n", encoding="utf-8")
    else:
        print(rendered)


if __name__ == "__main__":
    sys.exit(main())
