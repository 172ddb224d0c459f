"""The lines printed at the end of a run: accuracy, traffic, time, and how to continue."""

import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from rich import box
from rich.table import Table

from pflsim.analysis.intervals import pooled_interval
from pflsim.config.names import program
from pflsim.display.formats import CHOSEN, NONE, WHEN, format_bytes, format_seconds, in_text, plural, who_is_evaluated
from pflsim.display.identity import identity
from pflsim.records.environment import JOB
from pflsim.records.folder import read_summary
from pflsim.records.predictions import read_predictions
from pflsim.records.summary import RunMeta, Summary, epsilons, newcomer_results
from pflsim.types import ModelKind


def accuracy_table(summary: Summary) -> Table:
    """Return the primary metric of both models in the rounds that matter."""
    meta = summary.meta
    what, evaluated = identity(meta.method).display, who_is_evaluated(meta.evaluated_on, bool(meta.attack))
    title = f"Test {in_text(meta.measures.primary)} of {what} on {meta.data}, over {evaluated}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model")
    table.add_column("when")
    for name in ("round", "mean", "std", "worst decile"):
        table.add_column(name, justify="right")
    for model in get_args(ModelKind):
        figures, name = summary.figures(model), model + (" *" if model == meta.reported_model else "")
        if figures["last"] is None:
            table.add_row(name, *[NONE] * 5)
        else:
            for number, (choice, label) in enumerate(CHOSEN.items()):
                round_number, stats = figures[choice] or (NONE, None)
                values = (stats.mean, stats.primary.std, stats.primary.worst_decile) if stats else ()
                cells = [f"{value:.4f}" for value in values] or [NONE] * 3
                table.add_row("" if number else name, label, str(round_number), *cells)
        table.add_section()
    return table


def result_lines(summary: Summary, folder: Path) -> Iterator[str]:
    """Yield the lines below the table.

    Args:
        summary: of the run.
        folder: has the scores of test rows, if they are recorded.
    """
    meta = summary.meta
    last, best = (summary.figures(meta.reported_model)[choice] for choice in ("last", "best_val"))
    scores = read_predictions(folder)
    if scores is not None:
        scores = scores.query("when == 'last' and model == @meta.reported_model and phase == @meta.reported.phase")
    for name, stats in last[1].metrics.items() if last else ():
        if name != meta.measures.primary or stats.undefined:
            missing = f" ({plural(stats.undefined, 'client')} undefined)" if stats.undefined else ""
            ends = pooled_interval(name, scores) if math.isfinite(stats.pooled) else None
            interval = f" [{ends[0]:.4f}, {ends[1]:.4f}]" if ends else ""
            means = f"{stats.mean:.4f} over clients, {stats.pooled:.4f}{interval} over all examples"
            yield f"{in_text(name):<12} {means}{missing}, last round"
    if last and last[1].domains:
        yield f"by domain    {', '.join(f'{name} {mean:.4f}' for name, mean in last[1].domains.items())}"
    when = WHEN[meta.phase(meta.reported_model)]
    yield f"* {identity(meta.method).display} reports its {meta.reported_model} model, {when}"
    yield f"reports      take its row {CHOSEN['best_val' if best else 'last']}"
    if summary.newcomers is not None:
        found = newcomer_results(summary.newcomers, meta.measures).items()
        means = {phase: NONE if each is None else f"{each.mean:.4f}" for phase, each in found}
        after = f"{means['trained']} after {plural(meta.finetune_epochs, 'epoch')} of training"
        yield f"newcomers    {plural(meta.newcomers, 'client')}: {means['received']} as received, {after}"
        if few := [f"{mean} {phase}" for phase, mean in means.items() if "_" in phase]:
            yield f"             {', '.join(few)}"
    n, rounds = meta.clients - meta.newcomers, [line for line in summary.history if line.round]
    if rounds and (left := n - len(summary.drawn)):
        yield f"not trained  {plural(left, 'client')}: drawn in no round"
    if meta.privacy and (found := epsilons(meta.privacy, summary.rounds, summary.drawn)):
        most = " of the client with the largest" * (len(found) > 1)
        yield f"privacy      ε = {max(found):.4g} per {meta.privacy['unit']}{most} at δ = {meta.privacy['delta']:g}"
    yield f"traffic      up {format_bytes(summary.traffic.up_bytes)}, down {format_bytes(summary.traffic.down_bytes)}"
    spent = sum(line.total_seconds for line in summary.history)
    each = f", {format_seconds(spent / len(summary.history))} per round" if summary.history else ""
    other = format_seconds(max(summary.seconds - spent, 0))
    yield f"time         {format_seconds(summary.seconds)}: rounds {format_seconds(spent)}{each}; startup {other}"


def result_line(folder: Path) -> str:
    """Return the accuracy, the time and the folder of a complete run in one line."""
    summary = read_summary(folder)
    primary = summary["primary"]["name"]
    figures = summary["metrics"][primary][summary["reported_model"]]
    best = figures["best_val"] or figures["last"]
    accuracy = f"{in_text(primary)} {best['mean']:.4f} in round {best['round']}" if best else "not evaluated"
    return f"{accuracy}, {format_seconds(summary['seconds'])}, {folder}"


def headline(meta: RunMeta) -> str:
    """Return a run's method, data, model, and size in one line."""
    task = "" if meta.task == "classification" else f", {meta.task}"
    newcomers = f" ({meta.newcomers} of them join after the last round)" if meta.newcomers else ""
    size = f"{meta.clients} clients{newcomers}, {meta.rounds} rounds, seed {meta.seed}"
    return f"{identity(meta.method).display} on {meta.data} ({meta.partition}){task}, {meta.model}: {size}"


def resume_command(folder: Path, url: str | None = None) -> str:
    """Return the command that resumes a run; a submitted job is resumed by another one.

    Args:
        folder: the run folder.
        url: the URL of the remote copy; None: there is none.
    """
    start, folder = (os.environ[JOB], folder.absolute()) if JOB in os.environ else (program(), folder)
    copy = f" {shlex.quote(f'run_dir={url}')}" if url else ""
    return f"{start} resume={shlex.quote(str(folder))}{copy}"


def tensorboard_command(folder: Path) -> str:
    """Return the command that shows a run's curves, with the path of the program if it is not on PATH."""
    program = "tensorboard" if shutil.which("tensorboard") else Path(sys.executable).with_name("tensorboard")
    return f"{shlex.quote(str(program))} --logdir {shlex.quote(str(folder))}"
