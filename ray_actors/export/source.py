"""What is exported: which clients, of which run and checkpoint, by which model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pflsim.analysis.results import Run
from pflsim.config.checks import check
from pflsim.config.components import settings_of, targets_of
from pflsim.config.settings import Settings
from pflsim.engine.execution import EvalRequest
from pflsim.errors import SettingsError
from pflsim.run_folder.checkpoint import Checkpoint, check_header
from pflsim.run_folder.metrics import Model
from ray_actors.placement.cpu_fallback import on_cpus, on_gpus
from ray_actors.prepare import PreparedRun, prepare


@dataclass(frozen=True, slots=True)
class Source:
    """What is exported: which model of which checkpoint of which run."""

    run: Run
    job: PreparedRun
    checkpoint: Checkpoint
    request: EvalRequest
    exact: bool
    """Whether the counts must be the same: it is computed on the same kind of device."""


def chosen_clients(asked: str, settings: Settings) -> tuple[int, ...]:
    """The clients that are asked for: a number, several with commas, or `all`, which are those that took part.

    Raises:
        SettingsError: there is no such client, or no checkpoint has its model.
    """
    trained, everyone = settings.clients - settings.eval.holdout_clients, settings.clients
    if asked == "all":
        return tuple(range(trained))
    numbers = [text.strip() for text in asked.split(",")]
    if not all(n.isdecimal() for n in numbers):
        raise SettingsError(f"--client {asked}: expected a number, several with commas, or all")
    for number in map(int, numbers):
        if trained <= number < everyone:
            raise SettingsError(
                f"--client {number} joined after the last round, and no checkpoint has its model; clients 0 to "
                f"{trained - 1} took part in the training"
            )
        if number >= everyone:
            raise SettingsError(f"--client {number}: the run has clients 0 to {trained - 1}")
    return tuple(sorted({int(n) for n in numbers}))


def find_source(run: Run, settings: Settings, checkpoint: Checkpoint, model: Model | None, data: str | None) -> Source:
    """Prepare the run once more, with its own settings.

    Args:
        run: as its folder tells it.
        settings: of the run.
        checkpoint: of the run.
        model: whose; None: the one that the method is judged by.
        data: where the data set is now; None: where it was.

    Raises:
        SettingsError: the data are not there or are others, or the checkpoint is of another run.
    """
    mixed = settings.placement.cpu_actors > 0  # some clients were counted on one kind of device, some on the other
    exact = not on_gpus(settings.placement) or (torch.cuda.is_available() and not mixed)
    if not exact:
        settings = on_cpus(settings)
    elif on_gpus(settings.placement):  # it takes one, however many the run had
        settings = replace(settings, placement=replace(settings.placement, gpus=1))
    settings = settings if data is None else replace(settings, data=_moved(settings.data, data))
    check(settings)
    try:
        job = prepare(settings)
    except SettingsError as error:
        hint = "" if data else "; if the data have moved: --data DIR"
        raise SettingsError(f"{error}{hint}") from error
    if checkpoint.header.get("partition_hash") != job.meta.partition_hash:
        raise SettingsError("the data are not those of the run: its clients would hold other examples")
    if exact:
        check_header(checkpoint, {"method": job.plan.method, **(job.plan.header or {})}, lambda line: None)
    which: Model = model or job.meta.reported_model
    request = EvalRequest(which, job.meta.phase(which), (), ("test",), checkpoint.round)
    return Source(run, job, checkpoint, request, exact)


def _moved(node: Mapping[str, Any], data: str) -> dict[str, Any]:
    """The data's settings with another place."""
    keys = [key for key in ("root", "path") if key in settings_of(targets_of(node, "data"), "data")]
    if not keys:
        raise SettingsError("--data: this data set comes with its package and is in no folder")
    return {**node, keys[0]: data}
