"""Reserves resources on cluster nodes, as placement groups, before any actor starts: other jobs may want them too."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group

from pflsim.errors import SettingsError
from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec, Node
from ray_actors.placement.nodes import alive_nodes

NODE_LABEL = "ray.io/node-id"


def reserve(specs: Sequence[ActorSpec], timeout_s: float) -> list[Any]:
    """Reserve the resources of all actors on their nodes, or none.

    Args:
        specs: the requests, each with a node.
        timeout_s: how long Ray may take to reserve them. Starting the actors may take longer.

    Returns:
        A placement group per actor.

    Raises:
        SettingsError: the resources are not free.
    """
    groups: list[Any] = []
    try:
        for spec in specs:
            groups.append(placement_group([bundle(spec)], bundle_label_selector=[{NODE_LABEL: spec.node}]))
        deadline = time.monotonic() + timeout_s
        # Ray ignores fractions of a second
        ready = all(group.wait(max(1, math.ceil(deadline - time.monotonic()))) for group in groups)
    except BaseException:
        release(groups)
        raise
    if not ready:
        release(groups)
        nodes = alive_nodes()
        raise SettingsError(
            f"the placement cannot be met: Ray did not find the resources within {timeout_s:g} s. Requested: "
            f"{_demand(specs, nodes)}. Free: {'; '.join(map(str, nodes)) or 'no nodes'}. Other jobs may use the "
            "cluster: request less (placement.actors, placement.cpus), or wait longer (placement.wait_s)"
        )
    return groups


def release(groups: Sequence[Any]) -> None:
    """Remove placement groups; the actors in them end."""
    for group in groups:
        with suppress(RayError):
            remove_placement_group(group)


def bundle(spec: ActorSpec) -> dict[str, float]:
    """Return the resources of an actor as a bundle of a placement group; memory in bytes."""
    amounts = {"CPU": spec.cpus, "GPU": spec.gpus, "memory": float(ACTOR_MB * 2**20)}
    return {name: amount for name, amount in amounts.items() if amount > 0}


def _demand(specs: Sequence[ActorSpec], nodes: Sequence[Node]) -> str:
    """Return the requested resources of each node."""
    addresses = {node.id: node.address for node in nodes}
    requests = []
    for id_ in dict.fromkeys(spec.node for spec in specs):
        mine = [spec for spec in specs if spec.node == id_]
        cpus, gpus = sum(spec.cpus for spec in mine), sum(spec.gpus for spec in mine)
        requests.append(Node(id_, addresses.get(id_, "a node that has left"), cpus, gpus, len(mine) * ACTOR_MB))
    return "; ".join(map(str, requests))
