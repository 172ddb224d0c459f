"""Reserves resources for actors as placement groups, and starts actors in them. Ray restarts actors that die."""

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from pflsim.errors import RunError
from ray_actors.client_actor import ClientActor
from ray_actors.layout import ACTOR_MB, Layout, Node
from ray_actors.ray_private import available_resources_per_node
from ray_actors.server_actor import ServerActor

POLL_S = 0.2
"""How often the driver checks Ray while it waits."""
PLACEMENT_POLL_S = 2.0
"""How often it checks the placement on a cluster."""


class ActorPool:
    """Client actors that all request the same, each in a bundle of a placement group, and the server actor.

    Actors start without a host, so they serve one run after another.

    Args:
        joined: whether Ray is a cluster, on which nodes may be lost; there, memory is reserved as well.

    Attributes:
        actors: the client actors.
        wait_s: how long Ray may take to reserve resources; the setting placement.wait_s.
        strategy: how placement groups use nodes, PACK or SPREAD.
        check_ray: raises a `RunError` if the Ray that this process has started has ended.
    """

    def __init__(self, joined: bool = False) -> None:
        self.joined, self.wait_s, self.strategy = joined, 60.0, "PACK"
        self.check_ray: Callable[[], None] = lambda: None
        self.actors: list[Any] = []
        self._bundle: dict[str, float] = {}
        self._groups: list[Any] = []
        self._server: Any = None
        self._checked = self._placed = 0.0

    def start(self, layout: Layout) -> list[Any]:
        """Return a client actor for each group of the layout. Actors may still be starting.

        Raises:
            RunError: Ray could not reserve the resources within `wait_s`.
        """
        memory = {"memory": float(ACTOR_MB * 2**20)} if self.joined else {}
        bundle = {"CPU": layout.cpus, "GPU": layout.gpus, **memory}
        bundle = {name: amount for name, amount in bundle.items() if amount > 0}
        if bundle != self._bundle:
            self._end_clients()
            self._bundle = bundle
        missing = len(layout.groups) - len(self.actors)
        if missing > 0:
            self._groups.append(placement_group([bundle] * missing, strategy=self.strategy))
            if not self._groups[-1].wait(max(1, math.ceil(self.wait_s))):
                remove_placement_group(self._groups.pop())
                raise RunError(f"{self._lack(missing)}: request fewer (placement.actors), or wait longer")
        for number in range(missing):
            strategy = PlacementGroupSchedulingStrategy(self._groups[-1], number)
            options: dict[str, Any] = {"num_cpus": layout.cpus, "num_gpus": layout.gpus, **memory}
            made: Any = ray.remote(max_restarts=-1, max_task_retries=-1)(ClientActor)
            self.actors.append(made.options(scheduling_strategy=strategy, **options).remote())
        return self.actors[: len(layout.groups)]

    def server(self) -> Any:
        """Return the server actor, on the driver's node. It needs no CPU of its own: it works while clients wait."""
        if self._server is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            made: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(ServerActor)
            self._server = made.options(scheduling_strategy=here).remote()
        return self._server

    def check(self) -> None:
        """Raise a `RunError` if Ray has ended, or if actors of a lost node have had no room for `wait_s` seconds."""
        self.check_ray()
        now = time.monotonic()
        if not self.joined or now < self._checked + PLACEMENT_POLL_S:
            return
        missing = len(self.actors) - sum(self.on_nodes().values())
        if not missing or now > self._checked + 2 * PLACEMENT_POLL_S:  # nobody waited meanwhile
            self._placed = now
        self._checked = now
        if now > self._placed + self.wait_s:
            fewer = len(self.actors) - missing
            advice = f"resume with placement.actors={fewer}" if fewer else "resume when nodes are free"
            raise RunError(f"{self._lack(missing)}: {advice}, or with a larger placement.wait_s")

    def on_nodes(self) -> Counter[str]:
        """Return how many client actors have resources on each node that is alive, by node id."""
        tables = [placement_group_table(group) for group in self._groups]
        alive = alive_ids()
        nodes = (node for table in tables for node in table["bundles_to_node_id"].values() if table["bundles"])
        return Counter(node for node in nodes if node in alive)

    def free(self) -> list[Node]:
        """Return the free resources of all nodes; those of this pool's actors count as free."""
        held, amounts = self.on_nodes(), available_resources_per_node()

        def left(id_: str, name: str) -> float:
            return round(amounts.get(id_, {}).get(name, 0.0) + held[id_] * self._bundle.get(name, 0.0), 4)

        found = [(node["NodeManagerAddress"], node["NodeID"]) for node in ray.nodes() if node["Alive"]]
        return [Node(at, left(id_, "CPU"), left(id_, "GPU"), left(id_, "memory") / 2**20) for at, id_ in sorted(found)]

    def _lack(self, missing: int) -> str:
        """Return what is missing, for an error."""
        amounts = {**self._bundle, "memory": ACTOR_MB} if self.joined else self._bundle
        needed = " and ".join(f"{v:g} {'MiB' if k == 'memory' else f'{k}s'}" for k, v in amounts.items())
        free = "; ".join(map(str, self.free()))
        return (
            f"{missing} client actors, each with {needed}, found no room within placement.wait_s={self.wait_s:g} "
            f"seconds. Free, or used by this run: {free}"
        )

    def close(self) -> None:
        """End all actors."""
        self._end_clients()
        if self._server is not None:
            ray.kill(self._server)
            self._server = None

    def _end_clients(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        for group in self._groups:
            with suppress(RayError):
                remove_placement_group(group)
        self.actors, self._groups = [], []


def alive_ids() -> frozenset[str]:
    """Return the ids of the nodes that are alive."""
    return frozenset(str(node["NodeID"]) for node in ray.nodes() if node["Alive"])
