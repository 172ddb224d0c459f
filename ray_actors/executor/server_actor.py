"""The server actor. It does not import Lightning, so that its process starts faster and is smaller.

This module imports nothing that takes time, so that the driver can start the actor before it has imported torch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray

from ray_actors.executor.remote_actor import RemoteActor, zero_copy

if TYPE_CHECKING:
    from pflsim.engine.diagnostics import RoundDiagnostics
    from pflsim.messages import Uplink
    from pflsim.servers.base import Federation, ServerRule
    from pflsim.types import Tensors
    from ray_actors.executor.zero_copy import ZeroCopyMessage


class RemoteServer(RemoteActor):
    """A server actor; `build` can be called again for the next run. What its methods return outlives its process."""

    def __init__(self) -> None:
        importlib.import_module("lightning_modules.hosts.server_host")

    def build(
        self, rule: ServerRule[Any], federation: Federation, threads: int, device: str, state: Any = None
    ) -> tuple[int, str]:
        """Build the server in place of any earlier one, and return the process id and the node's address.

        Args:
            rule: see `ServerHost`.
            federation: see `ServerHost`.
            threads: see `ServerHost`.
            device: see `ServerHost`.
            state: a state that `fuse` or `restore` returned; None: the initial one.
        """
        from lightning_modules.hosts.server_host import ServerHost

        self.host = ServerHost(rule, federation, threads, device)
        if state is not None:
            self.host.state = state
        return os.getpid(), ray.util.get_node_ip_address()

    def fuse(self, matrices: bool, *uplinks: Sequence[Uplink]) -> tuple[RoundDiagnostics, ZeroCopyMessage]:
        """Call `ServerHost.fuse`; returns the diagnostics and the new state."""
        return self.host.fuse(*uplinks, matrices=matrices), zero_copy(self.host.state)

    def restore(self, saved: object) -> tuple[int, ZeroCopyMessage]:
        """Call `ServerHost.restore`; returns 0 and the new state."""
        self.host.restore(saved)
        return 0, zero_copy(self.host.state)

    def numbers(self) -> Tensors:
        """Call `ServerHost.numbers`."""
        return self.host.numbers()

    def saved_state(self) -> ZeroCopyMessage:
        """Call `ServerHost.saved_state`."""
        return zero_copy(self.host.saved_state())

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
        unique: list[ZeroCopyMessage | None] = []
        for client, message in self.host.downlinks(clients, joining).items():
            key = identity(message)
            if key not in indices:
                indices[key] = len(unique)
                unique.append(zero_copy(message))
            sent[client] = indices[key], payload_bytes(message)
        return sent, *unique, *[None] * (len(clients) - len(unique))

    def send_global(self) -> tuple[bool, ZeroCopyMessage | None]:
        """Return whether the method has a global model, and the model."""
        message = self.host.global_message()
        return message is not None, None if message is None else zero_copy(message)
