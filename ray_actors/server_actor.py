"""The server actor. It does not import Lightning, so that its process starts faster and is smaller.

This module imports nothing that takes time, so that the driver can start the actor before it has imported torch.
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray import ObjectRef

from ray_actors.client_actor import Setup, process_name


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
        self._zero_copy = importlib.import_module("ray_actors.zero_copy").ZeroCopyMessage
        self._setup: Setup | None = None
        self._version: int | None = None
        self._process = process_name()

    def call(
        self, setup: Setup, state: ServerState, method: str, *arguments: Any, version: int = 0, **named: Any
    ) -> Any:
        """Call a method below, or one of `ServerHost`, with this host and state.

        Args:
            setup: of the host.
            state: before the call.
            method: its name.
            arguments: of the method, in their order.
            version: of the state after the call, if the method changes it; 0: it does not.
            named: the method's other arguments.

        Returns:
            The name of the process and the method's value. Then the new state, or what a method below returns besides.
        """
        from lightning_modules.hosts.server_host import ServerHost

        if setup != self._setup or (state.version != self._version and not state.ref):
            self.host = ServerHost(*setup.get()[0])
            self._setup, self._version = setup, None
        if state.version != self._version:
            if state.ref:
                self.host.state = ray.get(state.ref[0])
            self._version = state.version
        others: Sequence[Any] = ()
        if hasattr(self, method):
            value, *others = getattr(self, method)(*arguments)
        else:
            value = getattr(self.host, method)(*arguments, **named)
        if version:
            self._version, others = version, [self._zero_copy(self.host.state)]
        first = self._zero_copy((self._process, value))
        return (first, *others) if others else first

    def send(self, clients: Sequence[int], joining: bool = False) -> tuple[Any, ...]:
        """Make the downlinks of these clients, or the first ones if they are `joining`.

        Returns:
            For each client the index of its message and the size in bytes. Then each message once, followed by None up
            to the number of clients.
        """
        from lightning_modules.hosts.server_host import identity
        from pflsim.messages import payload_bytes

        indices: dict[tuple[int | None, ...], int] = {}
        sent: dict[int, tuple[int, int]] = {}
        unique: list[Any] = []
        for client, message in self.host.downlinks(clients, joining).items():
            key = identity(message)
            if key not in indices:
                indices[key] = len(unique)
                unique.append(self._zero_copy(message))
            sent[client] = indices[key], payload_bytes(message)
        return sent, *unique, *[None] * (len(clients) - len(unique))

    def send_global(self) -> tuple[bool, Any]:
        """Return whether the method has a global model, and the model."""
        message = self.host.global_message()
        return message is not None, None if message is None else self._zero_copy(message)
