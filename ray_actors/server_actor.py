"""The server actor. It does not import Lightning, so that its process starts faster and is smaller.

This module imports nothing that takes time, so that the driver can start the actor before it has imported torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray import ObjectRef

from ray_actors.client_actor import Setup, process_name

if TYPE_CHECKING:
    from pflsim.engine.diagnostics import RoundDiagnostics
    from pflsim.messages import Uplink
    from pflsim.types import Tensors
    from ray_actors.zero_copy import ZeroCopyMessage


class ServerState(NamedTuple):
    """A state of the server. Every call has one; the actor fetches it when its own state has another version.

    Args:
        version: a number that no other state of this process has.
        ref: a reference to the state; empty for the initial one.
    """

    version: int
    ref: tuple[ObjectRef, ...] = ()


class ServerActor:
    """A server actor. Ray can restart a process that died, and repeat its calls."""

    def __init__(self) -> None:
        importlib.import_module("lightning_modules.hosts.server_host")
        self._setup: Setup | None = None
        self._version: int | None = None
        self._process = process_name()

    def call(self, setup: Setup, state: ServerState, method: str, *arguments: Any) -> Any:
        """Call a method below with this host and state.

        Returns:
            The name of the process and the method's value; then what else the method returns.
        """
        from lightning_modules.hosts.server_host import ServerHost

        if setup != self._setup or (state.version != self._version and not state.ref):
            self.host = ServerHost(*setup.get()[0])
            self._setup, self._version = setup, None
        if state.version != self._version:
            if state.ref:
                self.host.state = ray.get(state.ref[0])
            self._version = state.version
        value, *others = getattr(self, method)(*arguments)
        return ((self._process, value), *others) if others else (self._process, value)

    def prepare(self) -> tuple[None]:
        """Do nothing: the server is built."""
        return (None,)

    def fuse(
        self, version: int, matrices: bool, *uplinks: Sequence[Uplink]
    ) -> tuple[RoundDiagnostics, ZeroCopyMessage]:
        """Call `ServerHost.fuse`; returns the diagnostics and the new state, which has this version."""
        from ray_actors.zero_copy import ZeroCopyMessage

        diagnostics = self.host.fuse(*uplinks, matrices=matrices)
        self._version = version
        return diagnostics, ZeroCopyMessage(self.host.state)

    def restore(self, version: int, saved: object) -> tuple[None, ZeroCopyMessage]:
        """Call `ServerHost.restore`; returns None and the new state, which has this version."""
        from ray_actors.zero_copy import ZeroCopyMessage

        self.host.restore(saved)
        self._version = version
        return None, ZeroCopyMessage(self.host.state)

    def numbers(self) -> tuple[Tensors]:
        """Call `ServerHost.numbers`."""
        return (self.host.numbers(),)

    def saved_state(self) -> tuple[ZeroCopyMessage]:
        """Call `ServerHost.saved_state`."""
        from ray_actors.zero_copy import ZeroCopyMessage

        return (ZeroCopyMessage(self.host.saved_state()),)

    def send(self, clients: Sequence[int], joining: bool = False) -> tuple[Any, ...]:
        """Make the downlinks of these clients, or the first ones if they are `joining`.

        Returns:
            For each client the index of its message and the size in bytes. Then each message once, followed by None up
            to the number of clients.
        """
        from lightning_modules.hosts.server_host import identity
        from pflsim.messages import payload_bytes
        from ray_actors.zero_copy import ZeroCopyMessage

        indices: dict[tuple[int | None, ...], int] = {}
        sent: dict[int, tuple[int, int]] = {}
        unique: list[ZeroCopyMessage | None] = []
        for client, message in self.host.downlinks(clients, joining).items():
            key = identity(message)
            if key not in indices:
                indices[key] = len(unique)
                unique.append(ZeroCopyMessage(message))
            sent[client] = indices[key], payload_bytes(message)
        return sent, *unique, *[None] * (len(clients) - len(unique))

    def send_global(self) -> tuple[bool, ZeroCopyMessage | None]:
        """Return whether the method has a global model, and the model."""
        from ray_actors.zero_copy import ZeroCopyMessage

        message = self.host.global_message()
        return message is not None, None if message is None else ZeroCopyMessage(message)
