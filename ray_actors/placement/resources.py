"""Computes the resources and the node of each client actor, on one machine or on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pflsim.config.settings import Placement
from pflsim.errors import SettingsError
from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec, Node, actors_per_node, share


class ActorCounts(NamedTuple):
    """The number of client actors with a GPU, or a share of one, and without."""

    on_gpus: int
    on_cpus: int

    @classmethod
    def of(cls, actors: int, placement: Placement) -> ActorCounts:
        """Split a number of actors as the settings say."""
        return cls(actors - placement.cpu_actors, placement.cpu_actors) if placement.gpus else cls(0, actors)


def assign_resources(
    actors: ActorCounts, placement: Placement, cpus: float, nodes: Sequence[Node]
) -> tuple[ActorSpec, ...]:
    """Return the spec of each actor, those with a GPU first.

    Actors share a GPU only if there are more actors than GPUs, and then as evenly as possible. On a cluster,
    `placement.strategy` chooses the GPUs, if there are more than requested, and the nodes of actors without a GPU.

    Args:
        actors: the number of actors.
        placement: the placement settings.
        cpus: the CPUs in total.
        nodes: the nodes of the cluster; empty on a single machine.

    Raises:
        SettingsError: the actors do not fit into the memory of the nodes.
    """
    total = sum(actors)
    if not nodes:
        each, gpu = share(cpus, total), _gpu_share(actors.on_gpus, placement.gpus)
        return (ActorSpec(each, gpu),) * actors.on_gpus + (ActorSpec(each, 0.0),) * actors.on_cpus
    on_gpus, gpus = _gpu_actors(actors.on_gpus, placement, nodes)
    on_cpus = _cpu_actors(actors.on_cpus, placement, nodes, on_gpus)
    per_node = [a + b for a, b in zip(on_gpus, on_cpus, strict=True)]
    if sum(per_node) < total or any(n > node.max_actors for n, node in zip(per_node, nodes, strict=True)):
        raise SettingsError(
            f"{total} client actors need {total * ACTOR_MB / 1024:.1f} GiB of memory, {ACTOR_MB} MiB each: request "
            "fewer (placement.actors, placement.clients_per_actor). Free resources: "
            f"{'; '.join(map(str, nodes))}"
        )
    specs = [
        (ActorSpec(share(node.cpus, n), _gpu_share(k, used), node.id), ActorSpec(share(node.cpus, n), 0.0, node.id))
        for node, n, k, used in zip(nodes, per_node, on_gpus, gpus, strict=True)
    ]
    with_gpu = [gpu for (gpu, _), count in zip(specs, on_gpus, strict=True) for _ in range(count)]
    return (*with_gpu, *(cpu for (_, cpu), count in zip(specs, on_cpus, strict=True) for _ in range(count)))


def gpu_slots(nodes: Sequence[Node], placement: Placement, per_gpu: int) -> list[int]:
    """Return how many actors with a GPU fit on each node, with `per_gpu` actors per GPU."""
    return _slots(nodes, _choose_gpus(nodes, placement, per_gpu), per_gpu)


def _slots(nodes: Sequence[Node], gpus: Sequence[int], per_gpu: int) -> list[int]:
    return [min(n * per_gpu, node.max_actors) for n, node in zip(gpus, nodes, strict=True)]


def _choose_gpus(nodes: Sequence[Node], placement: Placement, per_gpu: int) -> list[int]:
    """Return how many GPUs of each node to use, among the nodes with memory for an actor.

    GPUs whose node has memory for `per_gpu` actors each come first, then the GPUs with memory for the most actors,
    then any others, on which fewer actors share a GPU.
    """
    gpus = [int(node.gpus) if node.max_actors else 0 for node in nodes]
    full = [min(n, node.max_actors // per_gpu) for n, node in zip(gpus, nodes, strict=True)]
    used = actors_per_node(nodes, full, min(placement.gpus, sum(full)), placement.strategy)
    if sum(used) < placement.gpus:
        partial = [n for n, node in enumerate(nodes) if used[n] < gpus[n] and node.max_actors % per_gpu]
        partial.sort(key=lambda n: (-(nodes[n].max_actors % per_gpu), not nodes[n].here, nodes[n].address, nodes[n].id))
        for n in partial[: placement.gpus - sum(used)]:
            used[n] += 1
    rest = [a - b for a, b in zip(gpus, used, strict=True)]
    more = actors_per_node(nodes, rest, min(placement.gpus - sum(used), sum(rest)), placement.strategy)
    return [a + b for a, b in zip(used, more, strict=True)]


def _gpu_actors(actors: int, placement: Placement, nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
    """Return the actors with a GPU, and the GPUs used, of each node; fewer actors in total if they do not fit."""
    slots, gpus = [0] * len(nodes), [0] * len(nodes)
    if not placement.gpus:
        return slots, gpus
    for per_gpu in range(max(1, -(-actors // placement.gpus)), int(placement.actors_per_gpu) + 1):
        gpus = _choose_gpus(nodes, placement, per_gpu)
        slots = _slots(nodes, gpus, per_gpu)
        if sum(slots) >= actors:
            break
    # `_choose_gpus` has applied the strategy already
    return actors_per_node(nodes, slots, min(actors, sum(slots)), "spread"), gpus


def _cpu_actors(actors: int, placement: Placement, nodes: Sequence[Node], others: Sequence[int]) -> list[int]:
    """Return the actors without a GPU of each node, beside `others`: one per CPU, and more only if CPUs are missing."""
    slots = [node.slots(other) for node, other in zip(nodes, others, strict=True)]
    if sum(slots) < actors:  # then they share the CPUs of the actors with a GPU
        slots = [node.slots() for node in nodes]
    limits = [max(0, node.max_actors - other) for node, other in zip(nodes, others, strict=True)]
    return actors_per_node(nodes, slots, actors, placement.strategy, limits)


def _gpu_share(actors: int, gpus: int) -> float:
    """Return the fraction of a GPU that each actor requests."""
    return share(1, -(-actors // gpus)) if actors else 0.0
