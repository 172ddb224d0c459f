"""The nodes of a cluster: which are alive, and what is free on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import ray

from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec, Node
from ray_actors.placement.ray_private import available_resources_per_node

POLL_INTERVAL_S = 0.5
"""How often to ask Ray again while waiting for nodes."""


def alive_ids() -> frozenset[str]:
    """Return the ids of the nodes that are alive."""
    return frozenset(str(node["NodeID"]) for node in ray.nodes() if node["Alive"])


def addresses(ids: Collection[str]) -> list[str]:
    """Return the IP addresses of nodes, dead ones included."""
    return [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] in ids]


def alive_nodes(held: Collection[ActorSpec] = ()) -> tuple[Node, ...]:
    """Return the nodes that are alive, with their free resources.

    Args:
        held: actors that may be ended; their resources count as free.
    """
    here, free = ray.get_runtime_context().get_node_id(), available_resources_per_node()

    def described(node: dict[str, Any]) -> Node:
        id_ = str(node["NodeID"])
        specs, resources = [spec for spec in held if spec.node == id_], free.get(id_, {})
        return Node(
            id_,
            str(node["NodeManagerAddress"]),
            round(resources.get("CPU", 0.0) + sum(spec.cpus for spec in specs), 4),
            round(resources.get("GPU", 0.0) + sum(spec.gpus for spec in specs), 4),
            resources.get("memory", 0.0) / 2**20 + len(specs) * ACTOR_MB,
            id_ == here,
        )

    found = (described(node) for node in ray.nodes() if node["Alive"])
    return tuple(sorted(found, key=lambda node: (node.address, node.id)))


def whereabouts(specs: Sequence[ActorSpec]) -> str:
    """Return a line with the number of client actors on each node, and the node of the driver and the server."""
    here = ray.get_runtime_context().get_node_id()
    names = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in ray.nodes()}
    counts = Counter(names.get(spec.node or here, "a node that has left") for spec in specs)
    per_node = ", ".join(f"{count} on {name}" for name, count in sorted(counts.items()))
    return f"client actors: {per_node}; driver and server on {names.get(here, 'this machine')}"
