"""Decides where the actors of a run go, on this machine or on a cluster."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

from lightning_modules.hosts.devices import uses_gpus, visible_gpus
from lightning_modules.prepare import PreparedRun
from pflsim.config.settings import Placement, Settings
from pflsim.errors import SettingsError
from ray_actors.cluster.joined import JoinedRay
from ray_actors.cluster.local import LocalRay
from ray_actors.executor.dry_run import Footprint, choose_actors_per_gpu, max_actors_per_gpu
from ray_actors.placement.elastic import ElasticLayout
from ray_actors.placement.layout import Layout, lay_out
from ray_actors.placement.nodes import POLL_INTERVAL_S


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where the actors of a run go.

    Args:
        placement: the settings, with a number for `actors_per_gpu`.
        layout: the clients and the resources of each actor.
        elastic: computes new layouts when the nodes of a cluster change; None on a single machine.
        notes: lines for the log.
    """

    placement: Placement
    layout: Layout
    elastic: ElasticLayout | None
    notes: tuple[str, ...] = ()


def plan_deployment(prepared: PreparedRun, cluster: LocalRay | JoinedRay, known: dict[str, Footprint]) -> Deployment:
    """Decide where the actors of a run go; make a dry run if `placement.actors_per_gpu` is auto.

    Args:
        prepared: the run.
        cluster: provides the resources.
        known: results of earlier dry runs; a new one is added.

    Raises:
        SettingsError: the placement cannot be met. No client actor was started.
    """
    placement, notes = prepared.settings.placement, []
    if placement.gpus and placement.actors_per_gpu == "auto":
        lower = max_actors_per_gpu(prepared, cluster.supply(placement))
        _lay_out(prepared, cluster, replace(placement, actors_per_gpu=lower))  # waits for nodes, which add CPUs
        supply = cluster.supply(placement)
        upper = max_actors_per_gpu(prepared, supply)
        _lay_out(prepared, cluster, replace(placement, actors_per_gpu=upper))  # raises before anything is started
        clear = partial(cluster.pool, placement, Layout((), ()))  # starts Ray and ends all client actors
        placement, note = choose_actors_per_gpu(prepared, upper, supply.cpus, known, clear)
        notes.append(note)
    try:
        layout, elastic = _lay_out(prepared, cluster, placement)
    except SettingsError as error:
        raise SettingsError("; ".join([str(error), *notes])) from None
    notes += _idle_slots(prepared, placement, layout)
    if placement.cpu_actors:
        pairs = zip(layout.groups, layout.specs, strict=True)
        on_cpus = sorted(client for group, spec in pairs if not spec.gpus for client in group)
        notes.append(f"clients {', '.join(map(str, on_cpus))} train on CPUs, the others on GPUs")
    return Deployment(placement, layout, elastic, tuple(notes))


def _idle_slots(prepared: PreparedRun, placement: Placement, layout: Layout) -> list[str]:
    """Return a line if `placement.actors_per_gpu` asks for more actors than there are stacks of clients."""
    actors, slots = sum(spec.gpus > 0 for spec in layout.specs), placement.gpus * int(placement.actors_per_gpu)
    most = prepared.settings.clients - sum(len(stack) - 1 for stack in prepared.factory.stacks)
    if placement.actors is not None or not actors == most < slots:
        return []
    return [
        f"placement.actors_per_gpu={placement.actors_per_gpu} allows {slots} client actors on GPUs, but there are only "
        f"{most}, one for each stack of clients; for more stacks, lower lockstep_clients"
    ]


def _lay_out(
    prepared: PreparedRun, cluster: LocalRay | JoinedRay, placement: Placement
) -> tuple[Layout, ElasticLayout | None]:
    work, stacks = prepared.batches_per_round, prepared.factory.stacks
    if isinstance(cluster, JoinedRay):
        elastic = ElasticLayout(cluster.supply, work, placement, stacks)
        return elastic.first(), elastic
    return lay_out(work, placement, cluster.supply(placement), stacks), None


def available_gpus(cluster: LocalRay | JoinedRay, settings: Settings) -> float:
    """Return the number of GPUs for a run; on a cluster, wait for nodes for up to `placement.wait_s` seconds."""
    placement = settings.placement
    if isinstance(cluster, LocalRay):
        # with placement.device=cpu, GPUs are only a resource of Ray and need not exist
        seen = visible_gpus() if uses_gpus(placement) else placement.gpus
        return min(seen, cluster.supply(placement).gpus)
    deadline = time.monotonic() + placement.wait_s
    while (gpus := cluster.supply(placement).gpus) < placement.gpus and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    return gpus
