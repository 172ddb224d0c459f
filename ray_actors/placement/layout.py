"""Which clients live on which actor, and the resources that each actor requests.

This changes no result, except when some clients train on GPUs and others on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pflsim.config.settings import Placement
from pflsim.errors import SettingsError
from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec, Node
from ray_actors.placement.balance import LOCKSTEP_HINT, balance
from ray_actors.placement.resources import ActorCounts, assign_resources, gpu_slots


@dataclass(frozen=True, slots=True)
class Supply:
    """The free resources: CPUs, GPUs, memory in MiB (None: unknown), and the nodes of a cluster.

    On a cluster, `cpus` and `gpus` count the whole ones of each node: two halves on different nodes are not one.
    """

    cpus: float
    gpus: float
    free_mb: float | None = None
    nodes: tuple[Node, ...] = ()

    @classmethod
    def of(cls, nodes: Sequence[Node], max_cpus: int | None = None) -> Supply:
        """Return the free resources of nodes, with at most `max_cpus` CPUs in total."""
        kept, left = [], float("inf") if max_cpus is None else float(max_cpus)
        for node in sorted(nodes, key=lambda n: (not n.here, -n.cpus, n.address, n.id)):
            kept.append(replace(node, cpus=min(node.cpus, left)))
            left -= kept[-1].cpus
        return cls(sum(max(0, int(n.cpus)) for n in kept), sum(max(0, int(n.gpus)) for n in kept), nodes=tuple(kept))

    def __str__(self) -> str:
        return "; ".join(map(str, self.nodes))


@dataclass(frozen=True, slots=True)
class Layout:
    """The clients of each actor, and the resources that each actor requests."""

    groups: tuple[tuple[int, ...], ...]
    specs: tuple[ActorSpec, ...]

    @classmethod
    def even(cls, groups: Sequence[tuple[int, ...]], cpus: float, gpus: float) -> Layout:
        """Return a layout on one machine whose actors all request the same."""
        return cls(tuple(groups), (ActorSpec(cpus, gpus),) * len(groups))

    def host_of(self) -> dict[int, int]:
        """Return the index of the actor of each client."""
        return {client: index for index, group in enumerate(self.groups) for client in group}


def lay_out(work: Sequence[int], placement: Placement, supply: Supply, stacks: Sequence[Sequence[int]] = ()) -> Layout:
    """Assign clients to actors, and actors to nodes. Actors with a GPU come first.

    With `placement.cpu_actors`, the clients of each actor depend only on the work, the stacks and the settings, so that
    every client trains on the same device each time.

    Args:
        work: the work of each client, e.g. its mini-batches per round.
        placement: the placement settings, with a number for `actors_per_gpu`.
        supply: the free resources.
        stacks: the clients that train in lockstep and stay on one actor.

    Raises:
        SettingsError: the settings request more than is available.
    """
    clients = len(work)
    _check_supply(placement, supply)
    stacked = {client for stack in stacks for client in stack}
    stacks = [*stacks, *((client,) for client in range(clients) if client not in stacked)]
    counts = _count_actors(clients, len(stacks), placement, supply)
    per_actor = placement.clients_per_actor
    max_clients = None if placement.actors is not None or per_actor == "auto" else int(per_actor)
    speeds = [placement.gpu_speed] * counts.on_gpus + [1.0] * counts.on_cpus
    groups = balance(work, len(speeds), max_clients, stacks, speeds)
    slots = placement.gpus * int(placement.actors_per_gpu)
    if counts.on_gpus > slots:
        asked = f"placement.gpus={placement.gpus} with placement.actors_per_gpu={placement.actors_per_gpu}"
        why = f"{counts.on_gpus} client actors need a GPU, but {asked} allows {slots}"
        raise SettingsError(f"{why}: raise one of them, or placement.clients_per_actor")
    return Layout(groups, assign_resources(counts, placement, supply.cpus, supply.nodes))


def _check_supply(placement: Placement, supply: Supply) -> None:
    free = f". Free resources: {supply}" if supply.nodes else ""
    if placement.gpus > supply.gpus:
        raise SettingsError(f"placement.gpus={placement.gpus}, but Ray has {supply.gpus:g} GPUs: request fewer{free}")
    if supply.cpus < 1 and (not placement.gpus or placement.cpu_actors):
        wait = "; other jobs may use them, so wait longer (placement.wait_s)" if supply.nodes else ""
        raise SettingsError(f"the clients need at least 1 CPU, but Ray has {supply.cpus:g} CPUs free{wait}{free}")


def _count_actors(clients: int, stacks: int, placement: Placement, supply: Supply) -> ActorCounts:
    """Return the configured number of actors, or one per stack, limited by the free resources."""
    if placement.actors is not None:
        if not 1 <= placement.actors <= clients:
            raise SettingsError(f"placement.actors={placement.actors} must be between 1 and clients={clients}")
        if placement.actors > stacks:
            why = f"is more than the {stacks} stacks of clients, each on one actor"
            raise SettingsError(f"placement.actors={placement.actors} {why}: lower it, or {LOCKSTEP_HINT}")
        return ActorCounts.of(placement.actors, placement)
    if placement.cpu_actors >= stacks:
        why = f"leaves none of the {stacks} stacks of clients for the GPUs"
        raise SettingsError(f"placement.cpu_actors={placement.cpu_actors} {why}: lower it, or {LOCKSTEP_HINT}")
    if placement.clients_per_actor != "auto":
        return ActorCounts.of(-(-clients // int(placement.clients_per_actor)), placement)
    per_gpu = int(placement.actors_per_gpu)
    if placement.cpu_actors:  # memory must not decide here: it would change the devices of clients
        return ActorCounts.of(min(stacks, placement.gpus * per_gpu + placement.cpu_actors), placement)
    slots = placement.gpus * per_gpu if placement.gpus else int(supply.cpus)
    if supply.nodes:
        per_node = gpu_slots(supply.nodes, placement, per_gpu) if placement.gpus else [n.slots() for n in supply.nodes]
        slots = min(slots, sum(per_node))
    if supply.free_mb is not None:
        slots = min(slots, int(supply.free_mb // ACTOR_MB))
    return ActorCounts.of(max(1, min(stacks, slots)), placement)
