"""Starts actors with the resources that they need, and reuses them in later runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ray_actors.executor.client_actor import RemoteHost
from ray_actors.executor.server_actor import RemoteServer
from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec
from ray_actors.placement.reservations import release, reserve


@dataclass(slots=True, eq=False)
class _Host:
    """A client actor, its resources, and on a cluster its placement group."""

    spec: ActorSpec
    placement_group: Any
    actor: Any


class ActorPool:
    """Starts actors, and returns a running one where its resources fit: starting an actor takes seconds.

    Args:
        wait_s: how long Ray may take to reserve resources on nodes of a cluster.
    """

    def __init__(self, wait_s: float = 10.0) -> None:
        self.wait_s = wait_s
        self._hosts: list[_Host] = []
        self._server: Any = None

    @property
    def started(self) -> int:
        """The number of client actors."""
        return len(self._hosts)

    @property
    def specs(self) -> tuple[ActorSpec, ...]:
        """The resources of all client actors."""
        return tuple(host.spec for host in self._hosts)

    def hosts(self, specs: Sequence[ActorSpec]) -> list[Any]:
        """Return a client actor for each of these specs, in their order. Actors may still be starting.

        Raises:
            SettingsError: Ray could not reserve the resources on the cluster's nodes in time.
        """
        spare = list(self._hosts)
        chosen: list[_Host | None] = []
        for spec in specs:
            kept = next((host for host in spare if host.spec == spec), None)
            if kept is not None:
                spare.remove(kept)
            chosen.append(kept)
        missing = [spec for spec, host in zip(specs, chosen, strict=True) if host is None]
        groups = reserve([spec for spec in missing if spec.node], self.wait_s)
        try:
            for at, spec in enumerate(specs):
                if chosen[at] is None:
                    group = groups[0] if spec.node else None
                    chosen[at] = made = _Host(spec, group, _start(spec, group))
                    self._hosts.append(made)
                    if group is not None:
                        groups.remove(group)
        except BaseException:
            release(groups)  # those of actors that were not started
            raise
        return [host.actor for host in chosen if host is not None]

    def trim(self, specs: Sequence[ActorSpec]) -> None:
        """End the client actors that none of these specs needs, and free their resources."""
        wanted = Counter(specs)
        for host in list(self._hosts):
            wanted[host.spec] -= 1
            if wanted[host.spec] < 0:
                self._end(host)

    def replace(self, actor: Any) -> Any:
        """Start a new actor in place of one that died."""
        with suppress(Exception):  # it may be dead already
            ray.kill(actor)
        if actor is self._server:
            self._server = None
            return self.server()
        host = next(host for host in self._hosts if host.actor is actor)
        host.actor = _start(host.spec, host.placement_group)
        return host.actor

    def server(self) -> Any:
        """Return the server actor, on the driver's node. It needs no CPU of its own: it works while the hosts wait."""
        if self._server is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            made: Any = ray.remote(num_cpus=0, num_gpus=0)(RemoteServer)
            self._server = made.options(scheduling_strategy=here).remote()
        return self._server

    def close(self) -> None:
        """End all actors."""
        for host in list(self._hosts):
            self._end(host)
        if self._server is not None:
            ray.kill(self._server)
            self._server = None

    def _end(self, host: _Host) -> None:
        self._hosts.remove(host)
        ray.kill(host.actor)
        if host.placement_group is not None:
            release([host.placement_group])


def _start(spec: ActorSpec, placement_group: Any) -> Any:
    options: dict[str, Any] = {"num_cpus": spec.cpus, "num_gpus": spec.gpus}
    if placement_group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(placement_group, 0)
        options["memory"] = ACTOR_MB * 2**20
    return ray.remote(**options)(RemoteHost).remote()
