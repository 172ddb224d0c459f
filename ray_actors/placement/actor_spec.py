"""The resources that an actor requests, and the nodes that provide them. None of this changes a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ACTOR_MB = 600
"""Memory reserved per actor in MiB: about 420 MiB of imports, the rest for computation."""


class ActorSpec(NamedTuple):
    """The resources that one client actor requests.

    Args:
        cpus, gpus: amounts, in steps of 0.0001.
        node: the id of the node to run on; empty on a single machine.
    """

    cpus: float
    gpus: float
    node: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster and its free resources.

    Args:
        id: Ray's node id.
        address: its IP address, for messages.
        cpus, gpus: free CPUs and GPUs.
        memory_mb: free memory in MiB, as Ray counts it.
        here: whether the driver runs on this node.
    """

    id: str
    address: str
    cpus: float
    gpus: float
    memory_mb: float
    here: bool = False

    @property
    def max_actors(self) -> int:
        """The number of actors that fit into its memory."""
        return max(0, int(self.memory_mb // ACTOR_MB))

    def slots(self, others: int = 0) -> int:
        """Return how many CPU actors fit, one per CPU, beside `others` actors on the same node."""
        return max(0, min(int(self.cpus), self.max_actors) - others)

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPUs" if self.gpus else ""
        return f"{self.address}: {self.cpus:g} CPUs{gpus}, {self.memory_mb / 1024:.1f} GiB"


def actors_per_node(
    nodes: Sequence[Node], slots: Sequence[int], actors: int, strategy: str, limits: Sequence[int] | None = None
) -> list[int]:
    """Distribute actors over nodes; the total is smaller than `actors` if all limits are reached.

    Args:
        nodes: the nodes.
        slots: the free slots of each node. More actors than slots are distributed in proportion to the slots.
        actors: the number of actors.
        strategy: "pack" fills one node after the other, first the driver's, then by free slots, which keeps traffic
            between nodes low. "spread" fills all nodes to the same fraction of their slots.
        limits: the maximum number of actors of each node; None: no limit.
    """
    order = sorted(range(len(nodes)), key=lambda n: (not nodes[n].here, -slots[n], nodes[n].address, nodes[n].id))
    counts = [0] * len(nodes)
    limits = [actors] * len(nodes) if limits is None else limits
    free = [min(pair) for pair in zip(slots, limits, strict=True)]
    if strategy == "pack" and actors <= sum(free):
        for n in order:
            counts[n] = min(free[n], actors - sum(counts))
        return counts
    for _ in range(actors):
        usable = [n for n in order if slots[n] > 0 and counts[n] < limits[n]]
        if not usable:
            break
        counts[min(usable, key=lambda n: ((counts[n] + 1) / slots[n], order.index(n)))] += 1
    return counts


def share(amount: float, actors: int) -> float:
    """Return the CPUs, or the fraction of a GPU, of each actor: 1, or an equal share of `amount` if that is less.

    The share is rounded down to 0.0001, the smallest step that Ray counts, so that all actors fit.
    """
    return 1.0 if actors <= amount else int(amount * 10_000 / actors) / 10_000
