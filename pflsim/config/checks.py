"""Contradictions within the settings of a run, found before anything is loaded or started."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from pflsim.config.names import nearest
from pflsim.config.on_client_error import OnError
from pflsim.config.settings import Placement, Settings
from pflsim.config.urls import CONFIGURATION, has_password
from pflsim.errors import SettingsError

CHOICES = {
    "buffers": ("aggregate", "local", "recalibrate"),
    "init": ("same", "per_client"),
    "executor": ("ray", "inline"),
    "progress": ("auto", "live", "plain", "quiet"),
    "on_nonfinite": ("abort", "drop", "keep"),
    "lockstep": ("true", "false", "auto"),
    "eval.on": ("all", "participants"),
    "placement.device": ("auto", "cpu", "cuda"),
    "placement.strategy": ("pack", "spread"),
}
AT_LEAST_ONE = (
    "clients",
    "rounds",
    "local_epochs",
    "local_steps",
    "batch_size",
    "lockstep_clients",
    "eval.every",
    "tracking.diagnostics_every",
    "eval.batch_size",
    "placement.actors",
    "placement.cpus",
    "placement.nodes",
    "placement.threads",
    "checkpoint.keep",
)
AT_LEAST_ZERO = (
    "weight_decay",
    "checkpoint.every",
    "checkpoint.minutes",
    "placement.wait_s",
    "placement.gpus",
    "placement.cpu_actors",
    "eval.holdout_clients",
    "eval.finetune_epochs",
)
AT_MOST = {
    "clients": 1_000_000,
    "rounds": 100_000,
    "local_epochs": 1_000_000,
    "local_steps": 1_000_000,
    "eval.finetune_epochs": 1_000_000,
    "placement.threads": 256,
    "placement.wait_s": 86_400,
    "placement.gpu_speed": 1e6,
    "lr": 1e30,
    "weight_decay": 1e30,
}
"""Beyond lies no experiment: what is planned before the first round would take all memory, or a step overflow."""
ABOVE_ZERO = ("lr", "lr_decay", "placement.gpu_speed")
PROBABILITIES = ("faults.dropout", "faults.straggler")
SMALLEST_STORE = 75
"""MiB; Ray does not start with less."""
MOST_PER_GPU = 1000
"""Ray counts in ten-thousandths of a GPU, and each process of CUDA's takes hundreds of MiB."""


def check(settings: Settings) -> None:
    """Check the settings of a run against each other.

    Raises:
        SettingsError: says everything that is wrong, a line each: what was found, what is expected, what to do.
    """
    values = dict(_values(settings, ""))
    problems = list(_not_finite(values))
    broken = {problem.partition("=")[0] for problem in problems}
    problems += [p for p in _ranges(values) if p.partition("=")[0] not in broken]
    problems += [*_choices(values), *_length(settings), *_lockstep(settings), *_cohort(settings, broken)]
    problems += _rate(settings, broken)
    problems += [
        *_address(settings.ray_address),
        *_place(settings.placement, settings),
        *_rounds(settings),
        *_quick(settings),
        *_holdout(settings),
    ]
    if problems:
        raise SettingsError("\n".join(problems))


def check_sweep(runs: Sequence[Settings]) -> None:
    """Refuse a sweep whose runs would write into one folder.

    Raises:
        SettingsError: two runs name the same run_dir.
    """
    named = [run.run_dir for run in runs if run.run_dir is not None]
    for folder in named:
        if named.count(folder) > 1:
            raise SettingsError(
                f"run_dir={folder} is the folder of {named.count(folder)} runs of this sweep; leave run_dir out, or "
                "give each its own with what differs, for example run_dir='runs/mine-${seed}'"
            )


def _values(settings: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The values of the run's own settings by dotted key; those of parts are checked by the parts."""
    for f in fields(settings):
        value = getattr(settings, f.name)
        if is_dataclass(value):
            yield from _values(value, f"{prefix}{f.name}.")
        elif not isinstance(value, dict):
            yield prefix + f.name, value


def _not_finite(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name}={value}: expected a finite number"


def _ranges(values: dict[str, Any]) -> Iterator[str]:
    for name in AT_LEAST_ONE:
        if values[name] is not None and values[name] < 1:
            yield f"{name}={values[name]}: expected a whole number of at least 1"
    for name in AT_LEAST_ZERO:
        if values[name] < 0:
            yield f"{name}={values[name]}: expected a number of at least 0"
    for name, most in AT_MOST.items():
        if values[name] is not None and values[name] > most:
            yield f"{name}={values[name]}: expected at most {most}"
    for name in ABOVE_ZERO:
        if values[name] <= 0:
            yield f"{name}={values[name]}: expected a number above 0"
    for name in PROBABILITIES:
        if not 0 <= values[name] <= 1:
            yield f"{name}={values[name]}: expected a probability, in [0, 1]"
    if not 0 < values["faults.straggler_work"] < 1:
        yield f"faults.straggler_work={values['faults.straggler_work']}: expected a share of the work, in (0, 1)"
    if not 0 <= values["momentum"] < 1:
        yield f"momentum={values['momentum']}: expected a number in [0, 1)"
    if not 0 <= values["seed"] < 2**63:
        yield f"seed={values['seed']}: expected a whole number from 0 to 2^63 - 1"
    store = values["placement.object_store_mb"]
    if store is not None and store < SMALLEST_STORE:
        yield f"placement.object_store_mb={store}: expected at least {SMALLEST_STORE}, with which Ray can start"


def _choices(values: dict[str, Any]) -> Iterator[str]:
    for name, choices in CHOICES.items():
        value = str(values[name]).lower() if isinstance(values[name], bool) else values[name]
        if value not in choices:
            yield f"{name}={value}: {nearest(str(value), choices)}"
    try:
        OnError.of(values["on_client_error"])
    except SettingsError as error:
        yield str(error)
    if values["run_dir"] == "":
        yield "run_dir= is empty: expected a folder; leave it out for one under runs/"
    if values["run_dir"] and has_password(values["run_dir"]):
        yield f"run_dir has a password in it, which config.yaml would keep; take it out: {CONFIGURATION}"


def _rate(settings: Settings, broken: set[str]) -> Iterator[str]:
    if broken & {"lr", "lr_decay"} or settings.lr <= 0 or settings.lr_decay <= 1:
        return
    last = settings.rounds + (settings.eval.holdout_clients > 0)  # newcomers train in one more
    if math.log10(settings.lr) + math.log10(settings.lr_decay) * (last - 1) > 30:
        yield (
            f"lr_decay={settings.lr_decay}: the learning rate lr*lr_decay^(t-1) would be above 1e30 by round {last}; "
            "lr_decay is 1 or a little less"
        )


def _length(settings: Settings) -> Iterator[str]:
    if settings.local_epochs is not None and settings.local_steps is not None:
        yield (
            f"local_epochs={settings.local_epochs} and local_steps={settings.local_steps} both say how long a client "
            "trains; give one and set the other to null"
        )


def _lockstep(settings: Settings) -> Iterator[str]:
    if str(settings.lockstep).lower() == "false" and settings.lockstep_clients is not None:
        yield (f"lockstep_clients={settings.lockstep_clients} has no effect with lockstep=false; leave one of them out")


def _cohort(settings: Settings, broken: set[str]) -> Iterator[str]:
    trained = settings.clients - max(settings.eval.holdout_clients, 0)
    if trained < 1 or "fraction" in broken or settings.fraction == 1:
        return
    from pflsim.seeding import cohort_size  # here, since it loads torch, and most mistakes are found without

    try:
        cohort_size(trained, settings.fraction)
    except SettingsError as error:
        yield str(error)


def _address(address: str | None) -> Iterator[str]:
    if address is None or address == "auto" or re.fullmatch(r"[^:/\s]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}", address):
        return
    if "://" in address:
        yield (
            f"ray_address={address}: expected auto or HOST:PORT of a cluster that this machine is a node of; from "
            "elsewhere use python launch.py submit"
        )
    else:
        yield f"ray_address={address}: expected auto or HOST:PORT"


def _place(placement: Placement, settings: Settings) -> Iterator[str]:
    per_actor, actors = placement.clients_per_actor, placement.actors
    name = f"placement.clients_per_actor={per_actor}"
    if per_actor != "auto" and (not isinstance(per_actor, int) or per_actor < 1):
        yield f"{name}: expected auto or a whole number of at least 1"
    if actors is not None and per_actor != "auto":
        yield f"placement.actors={actors} and {name} contradict each other; leave one of them out"
    if actors is not None and actors > settings.clients:
        yield f"placement.actors={actors} is more than clients={settings.clients}; at most one actor per client"
    yield from _gpus(placement)


def _gpus(placement: Placement) -> Iterator[str]:
    per_gpu, on_cpus = placement.actors_per_gpu, placement.cpu_actors
    if per_gpu != "auto" and (not isinstance(per_gpu, int) or not 1 <= per_gpu <= MOST_PER_GPU):
        yield f"placement.actors_per_gpu={per_gpu}: expected auto or a whole number from 1 to {MOST_PER_GPU}"
    if placement.device == "cuda" and placement.gpus == 0:
        yield "placement.device=cuda with placement.gpus=0: no actor would be given a GPU; set placement.gpus as well"
    if placement.device == "cuda" and placement.cpu_fallback:
        yield (
            "placement.device=cuda and placement.cpu_fallback=true contradict each other; with placement.device=auto "
            "clients train on CPUs where the GPUs are missing"
        )
    if placement.device == "cpu" and placement.gpus > 0 and per_gpu == "auto":
        yield (
            "placement.actors_per_gpu=auto measures what a client takes of a GPU, and with placement.device=cpu it "
            "takes nothing; give a number"
        )
    if on_cpus <= 0:
        return
    name = f"placement.cpu_actors={on_cpus}"
    if placement.gpus == 0:
        yield f"{name} with placement.gpus=0: all actors are on CPUs then; leave it out, or set placement.gpus as well"
    if placement.actors is not None and on_cpus >= placement.actors:
        yield f"{name} of placement.actors={placement.actors} leaves none for the GPUs: expected fewer"
    if placement.clients_per_actor != "auto":
        yield (
            f"{name} and placement.clients_per_actor={placement.clients_per_actor} contradict each other, for clients "
            "are divided by the speed of the actors; leave one of them out"
        )
    if per_gpu == "auto":
        yield (
            f"{name} with placement.actors_per_gpu=auto: which client trains on which device, and with it the last "
            "digits, would depend on what is measured; give a number"
        )


def _rounds(settings: Settings) -> Iterator[str]:
    for number in settings.trace.rounds:
        if not 0 <= number <= settings.rounds:
            yield (
                f"trace.rounds={settings.trace.rounds}: round {number} is not one of 1 to {settings.rounds} "
                "(0 is the opening of methods that have one)"
            )


def _quick(settings: Settings) -> Iterator[str]:
    quick, experiment = settings.names.get("quick"), settings.names.get("experiment")
    if quick is not None and quick != experiment:
        with_it = "without an experiment" if experiment is None else f"with +experiment={experiment}"
        yield f"+quick={quick} {with_it}: a quick form belongs to the experiment of its name, +experiment={quick}"


def _holdout(settings: Settings) -> Iterator[str]:
    held = settings.eval.holdout_clients
    if settings.clients >= 1 and held >= settings.clients:
        yield (
            f"eval.holdout_clients={held} of clients={settings.clients} leaves nobody to train: expected at most "
            f"{settings.clients - 1}"
        )
