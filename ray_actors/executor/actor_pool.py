"""Actor processes, with what each asks of Ray."""

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
    """A client actor, with its seat and, on a cluster, what is reserved for it."""

    spec: ActorSpec
    reserved: Any
    actor: Any


class ActorPool:
    """Starts actors and, while it lives, gives them again to whoever asks for the same: each takes seconds to start.

    Args:
        patience_s: how long Ray may take to find room for what is asked on nodes of a cluster.
    """

    def __init__(self, patience_s: float = 10.0) -> None:
        self.patience_s = patience_s
        self._hosts: list[_Host] = []
        self._server: Any = None

    @property
    def started(self) -> int:
        """How many client actors there are."""
        return len(self._hosts)

    @property
    def specs(self) -> tuple[ActorSpec, ...]:
        """Of all client actors that there are."""
        return tuple(host.spec for host in self._hosts)

    def hosts(self, specs: Sequence[ActorSpec]) -> list[Any]:
        """A client actor on each of these seats, in their order; they may still be starting.

        Raises:
            SettingsError: what is asked for on nodes of a cluster is not free, as far as Ray has found out in time.
        """
        spare = list(self._hosts)
        chosen: list[_Host | None] = []
        for spec in specs:
            kept = next((host for host in spare if host.spec == spec), None)
            if kept is not None:
                spare.remove(kept)
            chosen.append(kept)
        missing = [spec for spec, host in zip(specs, chosen, strict=True) if host is None]
        reserved = reserve([spec for spec in missing if spec.node], self.patience_s)
        try:
            for at, spec in enumerate(specs):
                if chosen[at] is None:
                    place = reserved[0] if spec.node else None
                    chosen[at] = made = _Host(spec, place, _start(spec, place))
                    self._hosts.append(made)
                    if place is not None:
                        reserved.remove(place)
        except BaseException:
            release(reserved)  # for those that were not started; the others are this pool's to end
            raise
        return [host.actor for host in chosen if host is not None]

    def trim(self, specs: Sequence[ActorSpec]) -> None:
        """End the client actors that these seats have no use for, and give back what was reserved for them."""
        wanted = Counter(specs)
        for host in list(self._hosts):
            wanted[host.spec] -= 1
            if wanted[host.spec] < 0:
                self._end(host)

    def replace(self, actor: Any) -> Any:
        """A new actor in place of one that died."""
        with suppress(Exception):  # it may be dead already, or be about to die
            ray.kill(actor)
        if actor is self._server:
            self._server = None
            return self.server()
        host = self._host_of(actor)
        host.actor = _start(host.spec, host.reserved)
        return host.actor

    def node_of(self, actor: Any) -> str:
        """The id of the node that an actor is on, empty where there is only one."""
        return "" if actor is self._server else self._host_of(actor).spec.node

    def server(self) -> Any:
        """The server actor, beside the driver. It asks for no CPU of its own, for it works while the hosts wait."""
        if self._server is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            made: Any = ray.remote(num_cpus=0, num_gpus=0)(RemoteServer)
            self._server = made.options(scheduling_strategy=here).remote()
        return self._server

    def close(self) -> None:
        """End the actors."""
        for host in list(self._hosts):
            self._end(host)
        if self._server is not None:
            ray.kill(self._server)
            self._server = None

    def _end(self, host: _Host) -> None:
        self._hosts.remove(host)
        ray.kill(host.actor)
        if host.reserved is not None:
            release([host.reserved])

    def _host_of(self, actor: Any) -> _Host:
        for host in self._hosts:
            if host.actor is actor:
                return host
        raise ValueError("this actor is not of this pool")


def _start(spec: ActorSpec, reserved: Any) -> Any:
    options: dict[str, Any] = {"num_cpus": spec.cpus, "num_gpus": spec.gpus}
    if reserved is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=0)
        options["memory"] = ACTOR_MB * 2**20
    return ray.remote(**options)(RemoteHost).remote()
