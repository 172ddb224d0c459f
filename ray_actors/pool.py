"""Actor processes, with what each asks of Ray."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray

from ray_actors.remote_host import RemoteHost
from ray_actors.remote_server import RemoteServer


class Pool:
    """Starts actors and, while it lives, gives them again to whoever asks for the same: each takes seconds to start."""

    def __init__(self) -> None:
        self._hosts: dict[tuple[float, float], list[Any]] = {}
        self._server: Any = None

    @property
    def started(self) -> int:
        """How many client actors there are."""
        return sum(map(len, self._hosts.values()))

    def hosts(self, count: int, num_cpus: float, num_gpus: float) -> list[Any]:
        """So many client actors, each with these requests; they may still be starting."""
        kept = self._hosts.setdefault((num_cpus, num_gpus), [])
        kept.extend(_host(num_cpus, num_gpus) for _ in range(count - len(kept)))
        return kept[:count]

    def replace(self, actor: Any) -> Any:
        """A new actor in place of one that died."""
        with suppress(Exception):  # it may be dead already, or be about to die
            ray.kill(actor)
        if actor is self._server:
            self._server = None
            return self.server()
        for (num_cpus, num_gpus), kept in self._hosts.items():
            if actor in kept:
                kept[kept.index(actor)] = made = _host(num_cpus, num_gpus)
                return made
        raise ValueError("this actor is not of this pool")

    def server(self) -> Any:
        """The server actor. It asks for no CPU of its own, for it works while the hosts wait."""
        if self._server is None:
            self._server = ray.remote(num_cpus=0, num_gpus=0)(RemoteServer).remote()
        return self._server

    def close(self) -> None:
        """End the actors."""
        for actor in [*(host for kept in self._hosts.values() for host in kept), self._server]:
            if actor is not None:
                ray.kill(actor)
        self._hosts, self._server = {}, None


def _host(num_cpus: float, num_gpus: float) -> Any:
    return ray.remote(num_cpus=num_cpus, num_gpus=num_gpus)(RemoteHost).remote()
