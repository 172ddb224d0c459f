"""The command line `pflsim baselines`: regressions of a table, or untrained models of texts, as runs of their own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pflsim.analysis.baselines import Baselines, Predict, Rows
from pflsim.config.components import FEDAVG, TARGET, component_name
from pflsim.config.compose import OWN_DEFAULTS, config_folders, configs, parse, to_settings
from pflsim.config.names import nearest
from pflsim.config.settings import Settings
from pflsim.data.federate import load_federation
from pflsim.data.federated import shard
from pflsim.data.record import record_names, recorded_rows, write_partition
from pflsim.display.identity import identity
from pflsim.errors import SettingsError
from pflsim.progress import doing
from pflsim.records.environment import write_environment
from pflsim.records.evaluation import Scope
from pflsim.records.folder import create_run_folder, run_lock, run_log, write_config
from pflsim.records.predictions import to_bytes, updated, write_predictions
from pflsim.records.summary import RunMeta
from pflsim.records.tracker import Tracker
from pflsim.seeding import evaluated, newcomer_rows
from pflsim.tasks.metrics import Metric, check_primary, measures_of, metrics_of
from pflsim.tasks.task import Task, task_of
from pflsim.tasks.thresholds import decided
from pflsim.terminal.result import result_line
from pflsim.types import SPLITS, EvalPhase, EvalRow, ModelKind, NewcomerRecord, RoundRecord

MODELS = {"pooled": "pooled_regression", "local": "local_regression", "mixed": "mixed_model"}
"""Baselines, and their names among the methods."""
PHASES: dict[str, EvalPhase] = {"pooled": "received", "local": "trained", "mixed": "trained"}
"""When the models of runs that are like them are evaluated."""
RUNS = Path("runs")
BASE_MODEL = "base_model"
BASE = {"client": {TARGET: "lightning_modules.base_model.BaseModel"}, "server": {TARGET: FEDAVG}}
"""The baseline of task=language_model as a method, and its name."""
EXAMPLES = """examples:
  {program} baselines data=table data.path=visits.csv data.label=readmitted data.client=hospital seed=0,1,2
  {program} baselines data=table data.path=scores.csv data.label=score data.client=school --models mixed --slopes age
  {program} baselines task=language_model data=text data.path=notes model=hf model.path=DIR seed=0,1,2

Give the data settings and the seeds of the runs to compare with. pooled is one linear or logistic regression on the
rows of all clients, local is one for each client, and mixed is a mixed model with a random intercept of each client,
and random slopes of the columns that --slopes names. With task=language_model, the baseline is the model of the runs
before any training. compare and report show them beside the runs.
"""


def options(add: Callable[..., Any]) -> None:
    """Add the options of the command."""
    add("settings", nargs="+", metavar="SETTING", help="settings of data, split, eval and seed; of task and model too")
    add("--models", metavar="A,B", help=f"of a table; default: {','.join(MODELS)}")
    add("--slopes", default="", metavar="A,B", help="columns whose effect differs between clients in mixed")
    add("--into", type=Path, default=RUNS, metavar="DIR", help="folder for the run folders; default: runs")
    add("--config-dir", action="append", default=[], metavar="DIR", help="look for groups in DIR too; may be repeated")


def execute(options: argparse.Namespace) -> None:
    """Fit regressions to the rows of a table, or evaluate the base model of next tokens, on the seeds of runs."""
    from pflsim.analysis.compare import print_comparisons

    values = parse(options.settings)
    language = values.get("task", values.get("task.name")) == "language_model"
    asked = options.models or ("" if language else ",".join(MODELS))
    models, slopes = (list(filter(None, words.split(","))) for words in (asked, options.slopes))
    if language and (models or slopes):
        raise SettingsError("--models and --slopes are of a table, not of task=language_model; leave them out")
    check_options(models, slopes, values, [""] if language else MODELS)
    doing("importing PyTorch and reading the settings")
    runs = [to_settings(each) for each in configs(values, True, config_folders(options.config_dir))[1]]
    if language:
        return print_comparisons([*_base_models(runs, options.into)])
    for settings in runs:
        _check_settings(settings, models)
    folders = [folder for settings in runs for folder in run_baselines(settings, models, slopes, options.into)]
    print_comparisons(folders)


def _base_models(runs: Sequence[Settings], into: Path) -> Iterator[Path]:
    """Evaluate what the clients of runs start from; yield a run folder for each."""
    from pflsim.commands.sweep import new_runner

    with new_runner(runs[0], own_process=True) as runner:
        for settings in runs:
            folder = None if into == RUNS else str(into / f"{BASE_MODEL}-s{settings.seed}")
            names = {**settings.names, "method": BASE_MODEL}
            progress = "quiet" if settings.progress == "auto" else settings.progress
            run = replace(settings, method=BASE, names=names, rounds=1, run_dir=folder, progress=progress)
            yield runner.run(run, ())


def check_options(
    models: Sequence[str], slopes: Sequence[str], values: Mapping[str, Any], known: Iterable[str] = MODELS
) -> None:
    """Check options of the command line, and settings by dotted key; `known` are the models to choose from.

    Raises:
        SettingsError: one is wrong, or a package is missing.
    """
    for name in models or [""]:
        if name not in known:
            raise SettingsError(f"--models {name}: {nearest(name, known)}")
    if slopes and "mixed" not in models:
        raise SettingsError(f"--slopes {','.join(slopes)} has no effect without --models mixed; leave it out")
    if given := [key for key in values if key.partition(".")[0] in ("method", "run_dir")]:
        raise SettingsError(f"{given[0]}: baselines have no method, and --into is their folder; leave it out")
    if "mixed" in models and not find_spec("statsmodels"):
        raise SettingsError("--models mixed needs the package statsmodels: pip install 'pflsim[tables]'")


def _check_settings(settings: Settings, models: Sequence[str]) -> None:
    if settings.data[TARGET] != OWN_DEFAULTS[0]:
        raise SettingsError(f"data={component_name(settings, 'data')}: baselines need data=table")
    if settings.eval.clients == "participants":
        raise SettingsError("eval.clients=participants: baselines have no rounds; set eval.clients to all or a number")
    if "mixed" in models and not settings.data.get("client"):
        raise SettingsError("--models mixed needs data.client=COLUMN, whose values are the clients")


def run_baselines(settings: Settings, models: Sequence[str], slopes: Sequence[str], into: Path) -> Iterator[Path]:
    """Fit baselines to the rows of a run; write a run folder for each, and yield it.

    Args:
        settings: of a run.
        models: keys of `MODELS`.
        slopes: see `Baselines.fit`.
        into: the folder of the run folders.

    Raises:
        SettingsError: the data cannot be loaded, or a baseline is not one for them.
        RunError: a baseline cannot be fitted.
    """
    dataset, partition = load_federation(settings)
    if dataset.task == "multilabel":
        raise SettingsError("baselines predict one class or one value of each row, and the run has task=multilabel")
    task = task_of(settings, dataset, partition)
    metrics = metrics_of(settings.eval.metrics, task, settings.eval.primary)
    measures = measures_of(task, metrics, settings.eval)
    check_primary(measures, metrics, task, (shard(dataset, partition, c).test.y for c in range(settings.clients)))
    trained = settings.trained
    data, names = Baselines.of(dataset, partition, trained), record_names(settings)
    if "mixed" in models:
        data.check_mixed(slopes)
    for name in models:
        start = time.perf_counter()
        predict, doubt = data.fit(name, slopes)
        doing(f"evaluating the {name} baseline")
        model: ModelKind = "global" if name == "pooled" else "personal"
        phase, method = PHASES[name], MODELS[name]
        rows = partial(_rows, data=data, predict=predict, task=task, metrics=metrics)
        chosen = evaluated(settings.eval.clients, settings.seed, trained, ())
        scope = Scope(model, "test", phase)
        found = rows(chosen, scope)
        pooled = _metrics(metrics, [row.outcomes for row in found if row.outcomes])
        if len(data.rows["val"].y):
            found += rows(chosen, scope._replace(split="val"))
        found, shares = decided(found, settings.eval.sensitivity)
        pooled |= shares.get(scope, {})
        newcomers = range(trained, settings.clients if name != "local" else trained)
        new = rows(newcomers, Scope("personal", "test", "received"))
        few = [*_few(data, predict, rows, newcomers, settings, name == "mixed")] if settings.eval.newcomer_rows else []
        own = {"baseline": name} | ({"slopes": list(slopes)} if name == "mixed" and slopes else {})
        names_of = {**settings.names, "method": method, "model": "linear"}
        its = replace(settings, method=own, rounds=1, names=names_of)
        folder = create_run_folder(method, dataset.name, settings.seed, None, into)
        with run_lock(folder), run_log(folder):
            write_config(folder, asdict(its))
            write_environment(folder)
            digest = write_partition(folder, dataset, partition, names, task.record())
            meta = RunMeta(
                method, dataset.name, ", ".join(filter(None, (names["partition"], names["shift"]))), digest, "linear",
                settings.clients, 1, settings.seed, model, phase,
                "all" if settings.eval.clients == trained else str(settings.eval.clients), measures, partition.names,
                settings.eval.newcomers, 0, dataset.num_classes, dataset.task,
            )  # fmt: skip
            seconds = {"total": time.perf_counter() - start}
            numbers = recorded_rows(settings.tracking.predictions, dataset, partition)
            best = any(row.split == "val" for row in found)
            write_predictions(folder, to_bytes(updated({}, 1, found, numbers, dataset.task, best)))
            found, new, few = ([replace(row, outcomes=None) for row in each] for each in (found, new, few))
            record = RoundRecord(1, tuple(range(trained)), (), {}, tuple(found), seconds, pooled={scope: pooled})
            joined = NewcomerRecord(1, {row.client: 0 for row in new}, tuple(new), (), tuple(few))
            _write(folder, meta, record, joined, doubt)
        print(f"{identity(method).display} seed={settings.seed}: {result_line(folder)}", flush=True)
        yield folder


def _write(folder: Path, meta: RunMeta, record: RoundRecord, newcomers: NewcomerRecord, doubt: str) -> None:
    """Write the records of a baseline, which has one round and no checkpoint."""
    with closing(Tracker(folder, meta)) as tracker:
        if doubt:
            tracker.warn(doubt)
        tracker.round(record)
        if meta.newcomers:
            tracker.newcomers(newcomers)
        tracker.close(states_saved=False)


def _few(
    data: Baselines, predict: Predict, rows: Any, newcomers: Iterable[int], settings: Settings, updates: bool
) -> Iterator[EvalRow]:
    """Yield evaluations of newcomers on all of their rows, and of a model that `updates`, after few training rows."""
    parts = [data.rows[split] for split in SPLITS]
    every = replace(data, rows={"test": Rows.joined(parts)})
    yield from rows(newcomers, Scope("personal", "test", cast(EvalPhase, "received_all")), data=every)
    for client in newcomers if updates else ():
        own = parts[0].of(parts[0].clients == client)
        order = newcomer_rows(settings.seed, client, len(own.y)).numpy()
        for number in settings.eval.newcomer_rows:
            if number <= len(order):
                scope = Scope("personal", "test", cast(EvalPhase, f"trained_{number}"))
                yield from rows([client], scope, predict=partial(predict, few=own.of(order[:number])))


def _rows(
    clients: Iterable[int], scope: Scope, data: Baselines, predict: Predict, task: Task, metrics: Sequence[Metric]
) -> list[EvalRow]:
    """Return the evaluation of a baseline on one split of some clients."""
    split, rows = data.rows[scope.split], list[EvalRow]()
    for client in clients:
        own = split.of(split.clients == client)
        scores = predict(own.x, own.clients)
        right = int((scores.argmax(1) == own.y).sum()) if data.classes else None
        std = np.array(task.std or (1.0,))
        loss = data.losses(scores if data.classes else scores / std, own.y if data.classes else own.y / std).sum()
        outcomes = torch.from_numpy(scores), torch.from_numpy(own.y)
        row = EvalRow(client, scope.split, scope.model, scope.phase, right, len(own.y), float(loss))
        rows.append(replace(row, metrics=_metrics(metrics, [outcomes]), outcomes=outcomes) if len(own.y) else row)
    return rows


def _metrics(metrics: Sequence[Metric], outcomes: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the metrics on the scores and targets of some clients together."""
    if not outcomes:
        return {}
    scores, targets = map(torch.cat, zip(*outcomes, strict=True))
    found = ((metric.name, metric(scores, targets)) for metric in metrics)
    return {name: value for name, value in found if value is not None}
