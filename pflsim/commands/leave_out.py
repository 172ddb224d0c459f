"""The command line `pflsim leave-out method=a,b …`: holds out each client once, and judges models on it."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pflsim.commands.sweep import of_all
from pflsim.commands.tune import positive, run_or_resume
from pflsim.config.checks import varying_keys
from pflsim.config.components import TARGET
from pflsim.config.compose import OWN_DEFAULTS, composed, config_folders, parse, sweep, to_settings
from pflsim.config.names import listed, written
from pflsim.config.settings import Settings
from pflsim.data.content import partition_hash
from pflsim.display.identity import identity, is_baseline
from pflsim.errors import RunError, SettingsError
from pflsim.progress import counted, doing
from pflsim.records.files import write_atomically
from pflsim.records.folder import CONFIG, is_complete, run_lock

if TYPE_CHECKING:
    from pandas import DataFrame

    from pflsim.data.dataset import Dataset
    from pflsim.data.federated import Partition

FEW, FOLDS = 20, 10
"""With at most so many clients, each is held out alone; else there are so many folds."""
DATA = "data.txt"
"""The hash of the partition without clients that are held out."""
EXAMPLES = """examples:
  {program} leave-out method=fedavg data=table data.path=visits.csv data.label=died data.client=hospital --into out
  {program} leave-out method=fedavg,ditto seed=0,1 data=table ... 'eval.newcomer_rows=[20]' --slopes age --into out

Runs differ in the clients that are held out (eval.holdout_clients); each client is held out once. Regressions stand
beside the methods, see {program} baselines --help. The same command continues what was stopped.
"""


def options(add: Callable[..., Any]) -> None:
    """Add the options of the command."""
    add("settings", nargs="+", metavar="SETTING", help="settings of a run; method, seed and others may have several")
    add("--folds", type=positive, metavar="K", help=f"default: the number of clients, or {FOLDS} if it is above {FEW}")
    add("--models", metavar="A,B", help="baselines of a table; default: pooled, and mixed if there is one; '': none")
    add("--slopes", default="", metavar="A,B", help="columns whose effect differs between clients in mixed")
    add("--into", type=Path, required=True, metavar="DIR", help="folder for the runs, leave-out.md and leave-out.csv")
    add("--config-dir", action="append", default=[], metavar="DIR", help="look for groups in DIR too; may be repeated")


def execute(options: argparse.Namespace) -> None:
    """Hold out each client once, and tell how well models work on clients that they do not know."""
    from pflsim.analysis.tables import drawn

    doing("importing PyTorch and reading the settings")
    jobs, runs, data = runs_of(parse(options.settings), options.folds, options.into, config_folders(options.config_dir))
    models, slopes = _models(options, runs[0], *data), [*filter(None, options.slopes.split(","))]
    left = [run for run in runs if not is_complete(Path(str(run.run_dir)))]
    if len(left) == len(runs):
        prepare = partial(importlib.import_module("lightning_modules.prepare").prepare, kept={})
        of_all(lambda run: prepare(run) and None, runs[: len(jobs)], [str(run.run_dir) for run in runs[: len(jobs)]])
    options.into.mkdir(parents=True, exist_ok=True)
    with run_lock(options.into):
        digest, file = partition_hash(*data), options.into / DATA
        if file.exists() and file.read_text() != digest:
            raise SettingsError(f"{options.into} has results of other data; choose a new --into")
        write_atomically(file, digest)
        failed = run_or_resume(left, runs[0].progress in ("auto", "live"))
        labels = dict(zip((str(run.run_dir) for run in runs), _labels(jobs) * (len(runs) // len(jobs)), strict=True))
        if models:
            labels |= _baselines(runs, models, slopes, options.into, failed)
        found = _results({Path(folder): label for folder, label in labels.items() if is_complete(Path(folder))})
        if len(found):
            table = _table(found, found["primary"].iloc[0])
            write_atomically(options.into / "leave-out.md", f"{drawn([table], 'markdown')}\n")
            found.drop(columns="primary").to_csv(options.into / "leave-out.csv", index=False)
            print(f"\n{drawn([table], 'text')}\n\nwritten: leave-out.md, leave-out.csv in {options.into}", flush=True)
    if failed:
        raise RunError("\n".join([*failed, "the same command continues"]))


def runs_of(
    given: Mapping[str, Any], folds: int | None, into: Path, folders: Sequence[Path]
) -> tuple[list[dict[str, Any]], list[Settings], tuple[Dataset, Partition]]:
    """Return the given settings of each combination, the settings of all runs, in their order in each fold, and data.

    Raises:
        SettingsError: a setting is wrong, the clients have no names, or a folder has another run.
    """
    from pflsim.data.federate import load_federation
    from pflsim.records.saved_settings import fixed_settings, saved_settings

    def fixed(run: Settings) -> dict[str, Any]:  # without those that a run fills in
        return {k: v for k, v in fixed_settings(run).items() if not k.startswith(("placement.", "lockstep_clients"))}

    for key in ("run_dir", "eval.holdout_clients", "resume"):
        if key in given:
            raise SettingsError(f"{key}: leave-out chooses it; leave it out")
    jobs = sweep({"executor": "inline", "eval.newcomer_rows": [10, 50], **given})
    data = load_federation(to_settings(composed({**jobs[0], "eval.newcomer_rows": []}, folders)))
    names = data[1].names
    if len(names) < (folds or 2):
        raise SettingsError(f"leave-out: {len(names)} clients have names (data.client=COLUMN), for {folds or 2} folds")
    count, runs = folds or (len(names) if len(names) <= FEW else FOLDS), list[Settings]()
    for fold in range(count):
        for number, job in enumerate(jobs):
            folder = into / f"{number:02}-{job.get('method', 'run')}-s{job.get('seed', 0)}-fold{fold:02}"
            held = {"eval.holdout_clients": [*names[fold::count]], "run_dir": str(folder)}
            runs.append(to_settings(composed({**job, **held}, folders)))
            if (folder / CONFIG).exists() and fixed(saved_settings(folder)) != fixed(runs[-1]):
                raise SettingsError(f"{folder} has a run with other settings; choose a new --into")
    return jobs, runs, data


def _models(options: argparse.Namespace, run: Settings, dataset: Dataset, partition: Partition) -> list[str]:
    """Return the baselines of the command line, checked; by default those that there are for a table, else none."""
    from pflsim.analysis.baselines import Baselines
    from pflsim.commands.baselines import check_options

    if run.data[TARGET] != OWN_DEFAULTS[0] or options.models == "":
        return []
    simple = dataset.num_classes == {"classification": 2, "regression": 1}.get(dataset.task)
    models = str(options.models or "pooled" + ",mixed" * simple).split(",")
    slopes = [*filter(None, options.slopes.split(","))]
    check_options(models, slopes, {}, known=("pooled", "mixed"))
    if "mixed" in models:
        Baselines.of(dataset, partition, partition.clients).check_mixed(slopes)
    return models


def _labels(jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of combinations for readers, without their seeds."""
    keys = [key for key in varying_keys(jobs) if key not in ("method", "seed")]
    names = (identity(job.get("method", "")).display for job in jobs)
    return [
        " ".join([name, *(f"{key}={written(job[key])}" for key in keys)]) for name, job in zip(names, jobs, strict=True)
    ]


def _baselines(
    runs: Sequence[Settings], models: Sequence[str], slopes: Sequence[str], into: Path, failed: list[str]
) -> Iterator[tuple[str, str]]:
    """Fit the baselines of each seed and fold that are not there yet; yield the folders of all, and their labels.

    Why one cannot be fitted is added to `failed`.
    """
    from pflsim.commands.baselines import MODELS, run_baselines
    from pflsim.records.older_settings import saved_config

    for run in {(run.seed, written(run.eval.holdout_clients)): run for run in runs}.values():
        fold = str(run.run_dir).rpartition("-")[2]
        folder, done = into / f"baselines-s{run.seed}-{fold}", dict[str, str]()
        for model in models:
            wanted = {"baseline": model} | ({"slopes": [*slopes]} if model == "mixed" and slopes else {})
            there = [path.parent for path in folder.glob(f"*/{CONFIG}") if saved_config(path)["method"] == wanted]
            try:
                fits = [path for path in there if is_complete(path)] or [*run_baselines(run, [model], slopes, folder)]
            except RunError as error:
                failed.append(f"{folder}: {error}")
                continue
            done[str(fits[0])] = identity(MODELS[model]).display
        yield from done.items()


def _results(folders: Mapping[Path, str]) -> DataFrame:
    """Return a row for each client that was held out, each set (see `judged_on`) and each run, with its metrics."""
    from pandas import DataFrame, concat

    from pflsim.analysis.runs import read_run

    found = [DataFrame()]
    for folder, label in counted("reading runs", [*folders.items()]):
        run = read_run(folder)
        rows, stats = run.per_client().query("model == 'newcomer' and split == 'test' and total > 0"), run.stats("last")
        kept = rows[["seed", "name", "phase", "total", *(stats.metrics if stats else ())]]
        doubt = "; ".join(run.summary.get("warnings", ())) if is_baseline(run.method) else ""
        found.append(kept.assign(method=label, primary=run.primary, warning=doubt))
    return concat(found, ignore_index=True)


def _table(found: Any, primary: str) -> Any:
    """Return a table of the means over clients, then over seeds: a row for each method, a column for each set."""
    from pflsim.analysis.tables import Table
    from pflsim.display.formats import NONE, in_text
    from pflsim.display.metrics import fixed

    known = found.dropna(subset=[primary])
    numbers = sorted({int(phase.rpartition("_")[2]) for phase in known["phase"] if phase[-1].isdigit()})
    columns = {"received_all": "as received,\nall rows", "received": "as\nreceived"}
    for n in numbers:
        columns |= {f"recalibrated_{n}": f"recalibrated,\n{n} rows", f"trained_{n}": f"after\n{n} rows"}
    columns["trained"] = "after\nall rows"
    shown = [phase for phase in columns if phase in {*known["phase"]}]
    every, rows = found["name"].nunique(), list[tuple[str, ...]]()
    for method, own in known.groupby("method", sort=False):
        cells = [str(method)]
        for phase in shown:
            part = own[own["phase"] == phase]
            mean, clients = part.groupby("seed")[primary].mean().mean(), part["name"].nunique()
            cells.append(NONE if part.empty else fixed(mean, 3) + f" ({clients})" * (clients < every))
        rows.append(tuple(cells))
    notes = [
        f"mean {in_text(primary)} over the {every} clients, each of which was held out once, then over seeds",
        "as received, all rows: on all rows of a client; all other columns: on its test rows",
        "after N rows: after local epochs on N of its training rows; mixed: with its random effects given these rows",
        "recalibrated: plus a constant that is estimated from N rows",
    ]
    if any(cell.endswith(")") for row in rows for cell in row[1:]):
        notes.append("(n): over n clients, since the others have fewer rows, or the metric is not defined for them")
    for (method, text), own in known[known["warning"] != ""].groupby(["method", "warning"]):
        notes.append(f"{method}, without {listed(sorted(own['name'].unique()))}: {text}")
    return Table(
        f"Clients that are held out, {in_text(primary)}",
        ("method", *(columns[phase] for phase in shown)),
        tuple(rows),
        tuple(notes),
    )
