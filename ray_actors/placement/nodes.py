"""The nodes of a cluster: which are alive, and what is free on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import ray
from ray._private.state import available_resources_per_node

from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec, Node

LOOK_S = 0.5
"""How often Ray is asked while something is waited for."""


def alive_ids() -> frozenset[str]:
    """The ids of the nodes that Ray holds to be alive."""
    return frozenset(str(node["NodeID"]) for node in ray.nodes() if node["Alive"])


def addresses(ids: Collection[str]) -> list[str]:
    """The IP addresses of nodes, also of dead ones."""
    return [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] in ids]


def alive_nodes(held: Collection[ActorSpec] = ()) -> tuple[Node, ...]:
    """All nodes that are alive, with what is free on them.

    Args:
        held: seats whose actors would be ended for others; what they hold counts as free.
    """
    here, free = ray.get_runtime_context().get_node_id(), available_resources_per_node()
    found = []
    for node in ray.nodes():
        name = str(node["NodeID"])
        if not node["Alive"]:
            continue
        mine, left = [spec for spec in held if spec.node == name], free.get(name, {})
        found.append(
            Node(
                name,
                str(node["NodeManagerAddress"]),
                round(left.get("CPU", 0.0) + sum(spec.cpus for spec in mine), 4),
                round(left.get("GPU", 0.0) + sum(spec.gpus for spec in mine), 4),
                left.get("memory", 0.0) / 2**20 + len(mine) * ACTOR_MB,
                name == here,
            )
        )
    return tuple(sorted(found, key=lambda node: (node.address, node.id)))


def whereabouts(specs: Sequence[ActorSpec]) -> str:
    """How many client actors there are on which node, and which has the driver and the server, in words."""
    here, names = ray.get_runtime_context().get_node_id(), {}
    for node in ray.nodes():
        names[str(node["NodeID"])] = str(node["NodeManagerAddress"])
    counts = Counter(names.get(spec.node or here, "a node that has left") for spec in specs)
    held = ", ".join(f"{count} on {name}" for name, count in sorted(counts.items()))
    return f"client actors: {held}; driver and server on {names.get(here, 'this machine')}"
