"""Finds what to export: the clients, the checkpoint, and which model of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pflsim.analysis.results import Run
from pflsim.config.checks import check
from pflsim.config.components import settings_of, targets_of
from pflsim.config.settings import Settings
from pflsim.engine.execution import EvalRequest
from pflsim.errors import SettingsError
from pflsim.run_folder.checkpoint.meta import Checkpoint
from pflsim.run_folder.checkpoint.read import check_header
from pflsim.run_folder.metrics import Model
from ray_actors.placement.devices import uses_gpus, with_cpus_only
from ray_actors.prepare import PreparedRun, prepare


@dataclass(frozen=True, slots=True)
class Source:
    """A run that is prepared again, and what to export of it.

    Args:
        run: the records of the run.
        prepared: the run, prepared again from its settings.
        checkpoint: the checkpoint to export from.
        request: which model to export.
        exact: whether the counts must equal the recorded ones, since the model runs on the same kind of device.
    """

    run: Run
    prepared: PreparedRun
    checkpoint: Checkpoint
    request: EvalRequest
    exact: bool


def chosen_clients(text: str, settings: Settings) -> tuple[int, ...]:
    """Return the clients that `--client` names: a number, several with commas, or `all` that took part in training.

    Raises:
        SettingsError: there is no such client, or no checkpoint has its model.
    """
    trained = settings.clients - settings.eval.holdout_clients
    if text == "all":
        return tuple(range(trained))
    numbers = [part.strip() for part in text.split(",")]
    if not all(n.isdecimal() for n in numbers):
        raise SettingsError(f"--client {text}: expected a number, several with commas, or all")
    for number in map(int, numbers):
        if number >= trained:
            late = " joined after the last round, so no checkpoint has its model" if number < settings.clients else ""
            raise SettingsError(f"--client {number}{late}: choose one of the clients 0 to {trained - 1}")
    return tuple(sorted({int(n) for n in numbers}))


def find_source(run: Run, settings: Settings, checkpoint: Checkpoint, model: Model | None, data: str | None) -> Source:
    """Prepare a run again, with its own settings.

    Args:
        run: the records of the run.
        settings: the settings of the run.
        checkpoint: the checkpoint to export from.
        model: the model to export; None: the reported model.
        data: the folder or file of the data; None: as in the settings.

    Raises:
        SettingsError: the data are missing or different, or the checkpoint belongs to another run.
    """
    mixed = settings.placement.cpu_actors > 0  # the run has evaluated some clients on CPUs, others on GPUs
    exact = not uses_gpus(settings.placement) or (torch.cuda.is_available() and not mixed)
    if not exact:
        settings = with_cpus_only(settings)
    elif uses_gpus(settings.placement):
        settings = replace(settings, placement=replace(settings.placement, gpus=1))
    if data is not None:
        keys = [key for key in ("root", "path") if key in settings_of(targets_of(settings.data, "data"), "data")]
        if not keys:
            raise SettingsError("--data: this data set comes with its package and is in no folder")
        settings = replace(settings, data={**settings.data, keys[0]: data})
    check(settings)
    try:
        prepared = prepare(settings)
    except SettingsError as error:
        hint = "" if data else "; if the data have moved, add --data DIR"
        raise SettingsError(f"{error}{hint}") from error
    if checkpoint.header.get("partition_hash") != prepared.meta.partition_hash:
        raise SettingsError("the data are not those of the run: the clients would have other examples")
    if exact:
        check_header(checkpoint, {"method": prepared.plan.method, **(prepared.plan.header or {})}, lambda line: None)
    which: Model = model or prepared.meta.reported_model
    request = EvalRequest(which, prepared.meta.phase(which), (), ("test",), checkpoint.round)
    return Source(run, prepared, checkpoint, request, exact)
