"""Room for actors on nodes of a cluster, which others may want as well: reserved before anything is started there."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group

from pflsim.errors import SettingsError
from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec
from ray_actors.placement.nodes import alive_nodes

NODE_LABEL = "ray.io/node-id"


def reserve(specs: Sequence[ActorSpec], patience_s: float) -> list[Any]:
    """Reserve what each seat asks for on its node; all of it or nothing.

    Args:
        specs: with nodes.
        patience_s: how long Ray may take to find it. The actors themselves may take longer to start.

    Raises:
        SettingsError: it was not free in time; says what was asked and what there is.
    """
    groups: list[Any] = []
    try:
        for spec in specs:
            groups.append(placement_group([bundle(spec)], bundle_label_selector=[{NODE_LABEL: spec.node}]))
        until = time.monotonic() + patience_s  # of which Ray drops fractions of a second
        had = all(group.wait(max(1, math.ceil(until - time.monotonic()))) for group in groups)
    except BaseException:
        release(groups)
        raise
    if not had:
        release(groups)
        raise SettingsError(
            f"the placement cannot be met, Ray found no room within {patience_s:g} s. Asked for are "
            f"{_demand(specs)}; free are {'; '.join(map(str, alive_nodes())) or 'no nodes'}. Others may use the "
            "cluster: ask for less (placement.actors, placement.cpus), or wait longer for it (placement.wait_s)"
        )
    return groups


def release(groups: Sequence[Any]) -> None:
    """Give back what was reserved; the actors on it end."""
    for group in groups:
        with suppress(RayError):
            remove_placement_group(group)


def bundle(spec: ActorSpec) -> dict[str, float]:
    """What a seat asks for, as Ray counts it: memory in bytes."""
    asked = {"CPU": spec.cpus, "GPU": spec.gpus, "memory": float(ACTOR_MB * 2**20)}
    return {name: amount for name, amount in asked.items() if amount > 0}


def _demand(specs: Sequence[ActorSpec]) -> str:
    """What all the seats ask for, node by node."""
    addresses = {node.id: node.address for node in alive_nodes()}
    words = []
    for node, count in Counter(spec.node for spec in specs).items():
        mine = [spec for spec in specs if spec.node == node]
        cpus, gpus = sum(s.cpus for s in mine), sum(s.gpus for s in mine)
        with_gpus = f", {gpus:g} GPUs" if gpus else ""
        where = addresses.get(node, "a node that has left")
        words.append(f"{where}: {cpus:g} CPUs{with_gpus}, {count * ACTOR_MB / 1024:.1f} GiB")
    return "; ".join(words)
