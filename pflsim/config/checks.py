"""Contradictions between the settings of a run, found before data are loaded or actors started.

`pflsim.config.plain` checks each setting alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec

from pflsim.config.installation import program
from pflsim.config.names import shortened, written
from pflsim.config.on_client_error import OnError
from pflsim.config.plain import dotted
from pflsim.config.settings import Settings
from pflsim.config.urls import check_no_password
from pflsim.errors import SettingsError

EXCLUSIVE = (
    ("local_epochs", "local_steps"),
    ("placement.actors", "placement.clients_per_actor"),
)
"""Settings of which one must have its default."""


def check(settings: Settings) -> None:
    """Check the settings of a run against each other.

    Raises:
        SettingsError: lists all contradictions, one per line.
    """
    problems = [
        *_training(settings),
        *_exclusive(settings),
        *_placement(settings),
        *_sweep(settings),
        *_texts(settings),
        *_loggers(settings),
        *_synthetic(settings),
    ]
    if problems:
        raise SettingsError("\n".join(problems))


def _loggers(settings: Settings) -> Iterator[str]:
    for name in settings.tracking.loggers:
        found = find_spec(name)
        if name != "csv" and (found is None or found.origin is None):  # no origin: a folder of this name
            yield f"tracking.loggers: the package {name} is not installed: pip install 'pflsim[{name}]'"


def _synthetic(settings: Settings) -> Iterator[str]:
    names, test_by = settings.names, settings.split.get("test_by")
    mixed = names.get("partition") != "by_writer" or (names.get("split") == "official" and test_by != "writers")
    if names.get("data") == "synthetic" and mixed:
        yield "data=synthetic has a model for each writer: set partition=by_writer split.test_by=writers"


def check_sweep(runs: Sequence[Settings]) -> None:
    """Refuse a sweep in which two runs have the same run folder.

    Raises:
        SettingsError: two runs have the same run_dir.
    """
    folders = [run.run_dir for run in runs if run.run_dir is not None]
    for folder in folders:
        if folders.count(folder) > 1:
            raise SettingsError(
                f"run_dir={folder} is the folder of {folders.count(folder)} runs of this sweep; leave run_dir out, or "
                "include what differs: run_dir='runs/mine-${seed}'"
            )


def _training(settings: Settings) -> Iterator[str]:
    held, clients = settings.eval.holdout_clients, settings.clients
    if held >= clients:
        yield f"eval.holdout_clients={held} leaves no client to train; with clients={clients} use at most {clients - 1}"
    elif settings.fraction < 1:
        from pflsim.seeding import cohort_size  # imports torch, which most runs do not need here

        yield from _message(cohort_size, clients - held, settings.fraction)
    if settings.lockstep is False and settings.lockstep_clients is not None:
        yield f"lockstep_clients={settings.lockstep_clients} has no effect with lockstep=false; leave one of them out"
    last = settings.rounds + (held > 0)  # newcomers train after the last round
    if math.log10(settings.lr) + math.log10(settings.lr_decay) * ((last - 1) // settings.lr_step) > 30:
        yield (
            f"lr_decay={settings.lr_decay}: the learning rate lr*lr_decay^(t-1) exceeds 1e30 by round {last}; use a "
            "value of at most 1"
        )

    for number in settings.trace.rounds:
        if number > settings.rounds:
            yield f"trace.rounds={settings.trace.rounds}: round {number} does not exist; the last is {settings.rounds}"


def _exclusive(settings: Settings) -> Iterator[str]:
    """Yield the pairs of `EXCLUSIVE` of which both differ from the default."""
    given, default = dotted(asdict(settings)), dotted(asdict(Settings()))
    for pair in EXCLUSIVE:
        if all(given[key] != default[key] for key in pair):
            values, unset = ([f"{key}={written(found[key])}" for key in pair] for found in (given, default))
            yield f"{' and '.join(values)} are both set; leave one of them out, or set {' or '.join(unset)}"


def _placement(settings: Settings) -> Iterator[str]:
    placement, clients = settings.placement, settings.clients
    if placement.actors is not None and placement.actors > clients:
        yield f"placement.actors={placement.actors} is more than clients={clients}; use at most one actor per client"
    if settings.precision == "tf32" and placement.gpus == 0:
        yield "precision=tf32 is a mode of GPUs, and placement.gpus=0; use precision=ieee or bf16"
    if placement.device == "cuda" and placement.gpus == 0:
        yield "placement.device=cuda with placement.gpus=0: no actor would have a GPU; set placement.gpus"


def _sweep(settings: Settings) -> Iterator[str]:
    parallel = settings.sweep.parallel
    if settings.executor == "ray" and parallel not in ("auto", 1):
        yield f"sweep.parallel={parallel}: a run on Ray uses all CPUs; set executor=inline, or leave it out"


def _texts(settings: Settings) -> Iterator[str]:
    yield from _message(OnError.of, settings.on_client_error)
    if settings.run_dir == "":
        yield "run_dir= is empty; expected a folder, or leave it out for one below runs/"
    if settings.run_dir:
        yield from _message(check_no_password, settings.run_dir, "run_dir")
    address = settings.ray_address
    if address is None or address == "auto" or re.fullmatch(r"([^:/\s]+|\[[0-9a-fA-F:]+\]):\d{1,5}", address):
        return
    job = f"; to run on another cluster use {program()} submit" if "://" in address else ""
    yield f"ray_address={shortened(address)}: expected auto or HOST:PORT{job}"


def _message(check: Callable[..., object], *arguments: object) -> Iterator[str]:
    """Yield the message of a check that fails."""
    try:
        check(*arguments)
    except SettingsError as error:
        yield str(error)
