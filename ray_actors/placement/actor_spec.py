"""What actors ask of Ray, and on which node each of them is. Nothing here can change a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

ACTOR_MB = 600
"""Memory that one actor is reckoned with: about 420 MB of imports, and room to work."""


class ActorSpec(NamedTuple):
    """What one client actor asks for.

    Args:
        cpus, gpus: shares of them count in steps of 0.0001.
        node: the id of the node that it is to be on; empty on a machine of one's own, where there is no other.
    """

    cpus: float
    gpus: float
    node: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster, with what is free on it.

    Args:
        id: Ray's.
        address: its IP address, for messages.
        cpus, gpus: free ones.
        memory_mb: free, as Ray counts it, in MiB.
        here: whether the driver runs on it.
    """

    id: str
    address: str
    cpus: float
    gpus: float
    memory_mb: float
    here: bool = False

    @property
    def holds(self) -> int:
        """How many actors its memory holds."""
        return max(0, int(self.memory_mb // ACTOR_MB))

    def slots(self, other: int = 0) -> int:
        """For how many actors on CPUs there is room, one a CPU, beside so many others."""
        return max(0, min(int(self.cpus), self.holds) - other)

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPUs" if self.gpus else ""
        return f"{self.address}: {self.cpus:g} CPUs{gpus}, {self.memory_mb / 1024:.1f} GiB"


def spread_over(
    nodes: Sequence[Node], room: Sequence[int], actors: int, strategy: str, most: Sequence[int] | None = None
) -> list[int]:
    """How many actors each node gets; fewer altogether where the most that nodes may get are used up.

    Args:
        nodes: all of them.
        room: how many actors each has room for; where the actors are more than that altogether, they are shared out in
            these proportions.
        actors: how many there are.
        strategy: "pack" fills one node after the other, the driver's first, then those with the most room: the
            fewer nodes, the less is sent between them. "spread" gives each as large a part of its room.
        most: how many actors each may get, whatever room there is; None: any number.
    """
    order = sorted(range(len(nodes)), key=lambda n: (not nodes[n].here, -room[n], nodes[n].address, nodes[n].id))
    counts = [0] * len(nodes)
    most = [actors] * len(nodes) if most is None else most
    first = [min(pair) for pair in zip(room, most, strict=True)]
    if strategy == "pack" and actors <= sum(first):
        for n in order:
            counts[n] = min(first[n], actors - sum(counts))
        return counts
    for _ in range(actors):
        usable = [n for n in order if room[n] > 0 and counts[n] < most[n]]
        if not usable:
            break
        counts[min(usable, key=lambda n: ((counts[n] + 1) / room[n], order.index(n)))] += 1
    return counts


def share(amount: float, actors: int) -> float:
    """CPUs, or of a GPU, per actor: one, or an even share where there are more actors than that.

    Ray counts in steps of 0.0001; rounded down, so that they fit together.
    """
    return 1.0 if actors <= amount else int(amount * 10_000 / actors) / 10_000
