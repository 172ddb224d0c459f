"""From a prepared run to the places of its actors, on a Ray of its own or a cluster."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

from pflsim.config.settings import Placement, Settings
from pflsim.errors import SettingsError
from ray_actors.cluster.joined import JoinedRay
from ray_actors.cluster.local import LocalRay
from ray_actors.executor.dry_run import DryRuns, most_per_gpu
from ray_actors.placement.cpu_fallback import gpus_here, on_gpus
from ray_actors.placement.elastic import ElasticLayout
from ray_actors.placement.layout import Layout, lay_out
from ray_actors.placement.nodes import LOOK_S
from ray_actors.prepare import PreparedRun


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where the actors of a run go.

    Args:
        placement: the settings, as they were decided.
        layout: the clients of each actor.
        elastic: of a cluster, where the layout may change; None: there is one machine.
        notes: what is to be said of it, a line each.
    """

    placement: Placement
    layout: Layout
    elastic: ElasticLayout | None
    notes: tuple[str, ...] = ()


def place(job: PreparedRun, found: LocalRay | JoinedRay, dry_runs: DryRuns, store_mb: int) -> Deployment:
    """Decide it, with a dry run where the settings ask for one.

    Raises:
        SettingsError: the placement cannot be met; no client actor was started.
    """
    placement, notes = job.settings.placement, []
    if placement.gpus and placement.actors_per_gpu == "auto":
        first = replace(placement, actors_per_gpu=most_per_gpu(job, found.supply(placement)))
        _laid_out(job, found, first)  # waits for nodes, whose CPUs count below
        supply = found.supply(placement)
        most = most_per_gpu(job, supply)
        _laid_out(job, found, replace(placement, actors_per_gpu=most))  # says what cannot be met, with nothing started
        clear = partial(found.clear, placement, store_mb)
        placement, told = dry_runs.decide(job, most, supply.cpus, clear)
        notes.append(told)
    try:
        layout, elastic = _laid_out(job, found, placement)
    except SettingsError as error:
        raise SettingsError("; ".join([str(error), *notes])) from None
    if placement.cpu_actors:
        notes.append(_mix(layout))
    return Deployment(placement, layout, elastic, tuple(notes))


def _laid_out(
    job: PreparedRun, found: LocalRay | JoinedRay, placement: Placement
) -> tuple[Layout, ElasticLayout | None]:
    if isinstance(found, JoinedRay):
        elastic = ElasticLayout(found, job.work, placement, job.factory.stacks)
        return elastic.first(), elastic
    return lay_out(job.work, placement, found.supply(placement), job.factory.stacks), None


def _mix(layout: Layout) -> str:
    """Which clients are on which kind of device."""
    pairs = list(zip(layout.groups, layout.specs, strict=True))
    on_cpus = sorted(client for group, spec in pairs if not spec.gpus for client in group)
    return f"clients {', '.join(map(str, on_cpus))} train on CPUs, the others on GPUs"


def gpus_there(found: LocalRay | JoinedRay, settings: Settings) -> float:
    """How many GPUs a run could have; on a cluster nodes with more are waited for as long as the settings say."""
    placement = settings.placement
    if isinstance(found, LocalRay):
        seen = gpus_here() if on_gpus(placement) else placement.gpus  # those that are only counted need not be there
        return min(seen, found.supply(placement).gpus)
    until = time.monotonic() + placement.wait_s
    while (there := found.supply(placement).gpus) < placement.gpus and time.monotonic() < until:
        time.sleep(LOOK_S)
    return there
