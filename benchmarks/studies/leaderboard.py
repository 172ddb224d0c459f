"""Computes the leaderboards of docs/results.md, run by run: `python -m benchmarks.studies.leaderboard --missing`.

A cell is one run, BENCHMARK/METHOD/SEED; `boards.py` defines them. `--missing` computes the cells that have no row in
docs/results, the most important ones first, and appends each when it is done:

- leaderboard-methods.csv: the values that tuning has chosen for a method, and the command of its runs;
- leaderboard.csv: a row for each cell;
- leaderboard-clients.csv: the primary metric of each client, with four digits.

`--replay CELL` runs a cell again and compares. `--table BENCHMARK` prints a leaderboard in Markdown, and `--table all`
docs/results/leaderboards.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import optuna
import pandas as pd

import pflsim
from benchmarks.studies.boards import BENCHMARKS, MIXED, Benchmark
from examples import real_clients
from pflsim.analysis.differences import Family, client_values, family
from pflsim.analysis.groups import Group
from pflsim.analysis.runs import read_run
from pflsim.commands.tune import side_by_side
from pflsim.commands.tune_study import Study, methods_of, settings_text
from pflsim.config.compose import composed, config_folders, parse, to_settings
from pflsim.display.formats import in_text, plural
from pflsim.display.identity import identity
from pflsim.display.metrics import scale_of, signed
from pflsim.engine.interrupts import Stopped
from pflsim.errors import RunError, SettingsError
from pflsim.records.environment import PACKAGE, versions
from pflsim.records.folder import is_complete
from pflsim.terminal.exit_status import exit_status

METHODS, ROWS, CLIENTS = "leaderboard-methods.csv", "leaderboard.csv", "leaderboard-clients.csv"
KEYS = ("benchmark", "method", "seed")
FIGURES = ("settings", "metric", "figure", "worst decile", "round", "partition")
COLUMNS = {
    METHODS: ("benchmark", "method", "settings", "trials", "validation", "command", "commit"),
    ROWS: (*KEYS, *FIGURES, "minutes", "commit", "versions"),
    CLIENTS: (*KEYS, "primary", "values"),
}
ABOUT = """This page is the output of `python -m benchmarks.studies.leaderboard --table all`. [Results](../results.md)
has the protocols and conclusions; [leaderboard-methods.csv](leaderboard-methods.csv) has the chosen values and the
commands of all runs. Methods that are missing have not been run yet. Differences are client by client, and the
[evidence](../statistics.md#the-levels) is that against Local, with one correction for all methods of a table. The first
row of a table is the best on test data, which favours it."""
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Cell:
    """A run of a leaderboard."""

    benchmark: str
    method: str
    seed: str

    @property
    def board(self) -> Benchmark:
        """The benchmark."""
        return BENCHMARKS[self.benchmark]

    @property
    def key(self) -> Row:
        """The first columns of its row."""
        return {"benchmark": self.benchmark, "method": self.method, "seed": self.seed}

    def __str__(self) -> str:
        """Return its name on the command line."""
        return f"{self.benchmark}/{self.method}/{self.seed}"


@dataclass(frozen=True, slots=True)
class Place:
    """Folders: of the data, of the runs, and of the results."""

    root: str
    runs: Path
    results: Path = PACKAGE.parent / "docs" / "results"

    def read(self, name: str) -> list[Row]:
        """Return the rows of a CSV file."""
        path = self.results / name
        return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []

    def append(self, name: str, row: Mapping[str, str]) -> None:
        """Append a row in one write, so that no process leaves a part of a row, or mixes it with another's."""
        with (self.results / name).open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS[name], lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)

    def chosen(self) -> dict[tuple[str, str], str]:
        """Return the last choice of settings, by benchmark and method."""
        return {(row["benchmark"], row["method"]): row["settings"] for row in self.read(METHODS)}

    def last(self, name: str) -> dict[Cell, Row]:
        """Return the last row of each cell."""
        return {Cell(*(row[key] for key in KEYS)): row for row in self.read(name)}

    def missing(self, pattern: str) -> list[Cell]:
        """Return the cells without a row for the chosen settings, the most important first, all seeds of a method."""
        rows, chosen = self.last(ROWS), self.chosen()
        found = [
            (board.order, rank, Cell(name, method, str(seed)))
            for name, board in BENCHMARKS.items()
            for rank, method in enumerate(board.methods)
            for seed in range(1, board.seeds + 1)
        ]
        matching = [each for *_, each in sorted(found, key=lambda one: one[:2]) if fnmatchcase(str(each), pattern)]
        if not matching:
            raise SettingsError(f"--only {pattern}: no cell matches; expected BENCHMARK/METHOD/SEED with * and ?")
        have = {each for each, row in rows.items() if row["settings"] == chosen.get((each.benchmark, each.method), "")}
        return [each for each in matching if each not in have]


def words(cell: Cell, settings: str, root: str) -> list[str]:
    """Return the settings of a cell's run as on the command line."""
    of_method = [] if cell.method == MIXED else [f"method={cell.method}", *settings.split()]
    common = f"{cell.board.settings} {cell.board.final}".replace("{root}", root)
    return [*of_method, f"seed={cell.seed}", *common.split()]


def choice(cell: Cell, settings: str, validation: str, commit: str) -> Row:
    """Return the row of chosen settings."""
    every = words(Cell(cell.benchmark, cell.method, "SEED"), settings, "DIR")
    command = " ".join(["python launch.py", *every, "executor=inline"])
    found = (cell.benchmark, cell.method, settings, str(cell.board.trials), validation, command, commit)
    return dict(zip(COLUMNS[METHODS], found, strict=True))


def tune(cell: Cell, place: Place) -> str:
    """Choose settings of a cell's method by validation, and record them; a study that was stopped goes on.

    Raises:
        RunError: all trials failed.
    """
    board, folder, folders = cell.board, place.runs / "tuning" / cell.benchmark / cell.method, config_folders([])
    common = f"{board.settings} {board.tuning} {board.spaces.get(cell.method, '')}".replace("{root}", place.root)
    folder.mkdir(parents=True, exist_ok=True)
    methods = methods_of(parse([f"method={cell.method}", *common.split(), "seed=0", "progress=none"]), folders)
    study = Study(folder, {"trials": board.trials, "seeds": 0, "rounds": None}, methods)
    study.write()
    # One trial at a time: the next one is suggested from the results of those before.
    for number, failed in side_by_side(study.ask(), 1):
        print(study.tell(number, failed), flush=True)
    best = study.chosen(methods[0])
    if best is None or best.value is None:
        raise RunError("all trials failed")
    settings = settings_text(best.params)
    place.append(METHODS, choice(cell, settings, f"{abs(best.value):.4f}", commit_of_code()))
    return settings


def measure(cell: Cell, place: Place, settings: str) -> tuple[Row, Row]:
    """Run a cell; return its row and that of its clients.

    Raises:
        RunError: the run failed.
    """
    board, began, folder = cell.board, time.monotonic(), place.runs / "final" / str(cell)
    if cell.method == MIXED or is_complete(folder):  # a finished run may be that of another commit
        shutil.rmtree(folder, ignore_errors=True)
    if cell.method == MIXED:
        figure, values, primary = mixed_model(cell, place.root, folder)
        digest, at = json.loads((folder / "partition.json").read_text())["hash"], ""
    else:
        text = [*words(cell, settings, place.root), "executor=inline", "progress=none", f"run_dir={folder}"]
        run_settings = to_settings(composed(parse(text), config_folders([])))
        for _, failed in side_by_side([run_settings], 1):
            if failed:
                raise RunError(failed)
        run = read_run(folder)
        line, values, primary = run.at(board.at), client_values(run, board.at)[run.primary].to_numpy(), run.primary
        assert line is not None
        stats = line.evaluations[run.reported].metrics[board.figure]
        figure, digest, at = stats.pooled if board.pooled else stats.mean, run.partition_hash, str(line.round)
    ordered = np.sort(values[~np.isnan(values)])[:: 1 if primary == "accuracy" else -1]
    worst = f"{ordered[: math.ceil(len(ordered) / 10)].mean():.6g}"
    figures = (settings, board.figure, repr(float(figure)), worst, at, digest[:12])
    package = " ".join(f"{name} {versions()[name]}" for name in ("python", "torch", "numpy"))
    row = dict(zip(FIGURES, figures, strict=True)) | {"commit": commit_of_code(), "versions": package}
    minutes = {"minutes": f"{(time.monotonic() - began) / 60:.2f}"}
    clients = {"primary": primary, "values": " ".join(f"{value:.4g}" for value in values)}
    return cell.key | row | minutes, cell.key | clients


def mixed_model(cell: Cell, root: str, folder: Path) -> tuple[float, np.ndarray, str]:
    """Fit the mixed model to the training rows of a run; return the figure, the clients' figures, and their metric."""
    rows, name = pflsim.partition(folder, overrides=words(cell, "", root)), cell.board.table
    train, test = (np.sort(np.concatenate(part)) for part in (rows.train, rows.test))
    frame, binary = pd.read_csv(Path(root) / f"{name}.csv"), cell.board.figure == "auroc"
    scores = real_clients.mixed_model(frame, train, test, name, int(cell.seed))
    y = real_clients.inputs(frame, train, name)[1][test]
    loss = pd.Series(np.logaddexp(0, scores) - y * scores if binary else (y - scores) ** 2, test)
    values = np.array([loss.loc[own].mean() for own in rows.test if len(own)])
    figure = abs(real_clients.error(y, scores, binary))
    return (figure, values, "nll") if binary else (figure, np.sqrt(values), "rmse")


def commit_of_code() -> str:
    """Return the commit, with a plus if files outside docs/ differ from it."""
    done = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], cwd=PACKAGE, capture_output=True, text=True)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)docs"], cwd=PACKAGE)
    return done.stdout.strip() + "+" * bool(changed.returncode)


def prepare(cell: Cell, root: str) -> None:
    """Write the table of real clients to the folder of the data."""
    if cell.board.table and not (Path(root) / f"{cell.board.table}.csv").exists():
        real_clients.read(cell.board.table, Path(root))


def compute(place: Place, pattern: str, minutes: float) -> int:
    """Compute what is missing until the time is over; return 1 if a method failed."""
    end, todo, failed = time.monotonic() + 60 * minutes, place.missing(pattern), set[tuple[str, str]]()
    print(f"missing: {plural(len(todo), 'cell')}", flush=True)
    for cell in todo:
        of_method = cell.benchmark, cell.method
        if time.monotonic() > end or of_method in failed:
            continue
        try:
            prepare(cell, place.root)
            settings = "" if cell.method == MIXED else place.chosen().get(of_method) or tune(cell, place)
            row, clients = measure(cell, place, settings)
        except Stopped:
            raise
        except (RunError, SettingsError) as error:
            failed.add(of_method)
            print(f"error: {cell}: {error}", file=sys.stderr, flush=True)
        else:
            place.append(CLIENTS, clients)
            place.append(ROWS, row)
            print(f"{cell}: {row['metric']} {float(row['figure']):.4f}, {row['minutes']} minutes", flush=True)
    return bool(failed)


def replay(place: Place, name: str) -> int:
    """Run a recorded cell again, print what differs, and return 1 if something does."""
    rows = place.last(ROWS)
    if (cell := next((each for each in rows if str(each) == name), None)) is None:
        raise SettingsError(f"{name}: {ROWS} has no such row; expected BENCHMARK/METHOD/SEED of a row")
    before = rows[cell] | place.last(CLIENTS)[cell]
    prepare(cell, place.root)
    print(" ".join(["python launch.py", *words(cell, before["settings"], "DIR")]), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        row, clients = measure(cell, Place(place.root, Path(folder)), before["settings"])
    now = row | clients
    differing = [key for key in (*FIGURES, "values") if before[key] != now[key]]
    for key in differing:
        print(f"{key}: {before[key]} before, {now[key]} now")
    print(f"{name}: {'different' if differing else 'equal'}; commits {before['commit']} and {now['commit']}")
    return bool(differing)


def standing(place: Place, benchmark: str) -> tuple[dict[str, list[Cell]], Family]:
    """Return the cells of the methods that have all seeds of Local, by method, and their differences to Local."""
    board, rows, clients = BENCHMARKS[benchmark], place.last(ROWS), place.last(CLIENTS)
    seeds = [str(s) for s in range(1, board.seeds + 1) if Cell(benchmark, "local", str(s)) in rows]
    own = {name: [Cell(benchmark, name, seed) for seed in seeds] for name in board.methods}
    if not seeds:
        raise SettingsError(f"{benchmark} has no row of Local yet")
    own = {name: found for name, found in own.items() if all(each in rows for each in found)}
    primary = clients[own["local"][0]]["primary"]
    common = {
        "primary": primary,
        "higher": primary == "accuracy",
        "partition": {"names": [board.table] if board.table else []},
    }
    runs = cast(Any, tuple(SimpleNamespace(**common, partition_hash=seed) for seed in seeds))
    groups = {name: Group(name, name, {}, runs) for name in own}
    values = {
        name: {
            int(cell.seed): pd.DataFrame({primary: [float(value) for value in clients[cell]["values"].split()]})
            for cell in found
        }
        for name, found in own.items()
    }
    return own, family([*groups.values()], groups["local"], values)


def table(place: Place, benchmark: str) -> Iterator[str]:
    """Yield a leaderboard, the best first, and the evidence against Local."""
    board, rows, clients = BENCHMARKS[benchmark], place.last(ROWS), place.last(CLIENTS)
    own, found = standing(place, benchmark)
    primary, differences = clients[own["local"][0]]["primary"], {d.group.label: d for d in found.differences}
    scale, decimals, unit = scale_of(primary)
    factor, digits = (100, 1) if unit else (1, 4)
    figure = in_text(board.figure) + ", %" * bool(unit)
    yield f"| method | {figure} | worst decile | {in_text(primary)} minus Local's | better, worse | evidence |"
    yield "|---|---|---|---|---|---|"
    figures = {name: [factor * float(rows[cell]["figure"]) for cell in found] for name, found in own.items()}
    for name in sorted(own, key=lambda name: fmean(figures[name]), reverse=board.figure != "rmse"):
        worst = factor * fmean(float(rows[cell]["worst decile"]) for cell in own[name])
        spread = f" ± {stdev(figures[name]):.{digits}f}" if len(own[name]) > 1 else ""
        d = differences.get(name)
        evidence = " | | "
        if d is not None and d.mean is not None:
            evidence = f"{signed(scale * d.mean, decimals)} | {d.better}, {d.worse} | {d.level}"
        shown = "mixed model" if name == MIXED else identity(name).display
        yield f"| {shown} | {fmean(figures[name]):.{digits}f}{spread} | {worst:.{min(digits, 3)}f} | {evidence} |"


def page(place: Place) -> Iterator[str]:
    """Yield a page with all leaderboards, in Markdown."""
    yield "# Leaderboards\n\n" + ABOUT
    have = place.last(ROWS)
    for name, board in BENCHMARKS.items():
        if Cell(name, "local", "1") in have:
            clients = "the same in every seed; each counts once" if board.table else "other ones in every seed"
            yield f"\n## {name}\n\n{board.seeds} seeds; the clients are {clients}.\n"
            yield from table(place, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.leaderboard")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--missing", action="store_true", help="compute the cells that have no row")
    what.add_argument("--replay", metavar="CELL", help="run BENCHMARK/METHOD/SEED again and compare")
    what.add_argument("--table", choices=[*BENCHMARKS, "all"], help="print a leaderboard, or a page with all")
    parser.add_argument("--only", default="*", metavar="GLOB", help="of cells, for example 'exam-linear/*'")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="MINUTES", help="then start no other cell")
    parser.add_argument("--data-root", default="data", metavar="DIR", help="folder of the data; default: data")
    parser.add_argument("--runs", type=Path, default=Path("runs/leaderboard"), metavar="DIR", help="folder of the runs")
    given = parser.parse_args(arguments)
    place = Place(os.path.abspath(given.data_root), given.runs)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if given.table:
        lines = page(place) if given.table == "all" else table(place, given.table)
        return exit_status(lambda: print("\n".join(lines)))
    if given.replay:
        return exit_status(lambda: replay(place, given.replay))
    return exit_status(lambda: compute(place, given.only, given.limit))


if __name__ == "__main__":
    sys.exit(main())
