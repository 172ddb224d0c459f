"""The server actor. It imports nothing of Lightning: its process is up sooner and smaller for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray

from pflsim.engine.diagnostics import RoundDiagnostics
from pflsim.messages import Uplink, payload_bytes
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors
from ray_actors.executor.zero_copy import ZeroCopyMessage
from ray_actors.hosts.server_host import ServerHost, identity


class RemoteServer:
    """Starts empty, to be settled for a run. What it makes are results of calls, which outlive its process."""

    def settle(self, rule: ServerRule[Any], federation: Federation, threads: int, state: Any = None) -> tuple[int, str]:
        """Build the server of a run in place of any that was here, in the state that `fuse` returned, or at its
        beginning; returns the process id and the node.
        """
        self.host = ServerHost(rule, federation, threads)
        if state is not None:
            self.host.state = state
        return os.getpid(), ray.util.get_node_ip_address()

    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    def fuse(self, matrices: bool, *uplinks: Sequence[Uplink]) -> tuple[RoundDiagnostics, ZeroCopyMessage]:
        """As `ServerHost.fuse`, with the state that comes of it."""
        return self.host.fuse(*uplinks, matrices=matrices), ZeroCopyMessage(self.host.state)

    def restore(self, saved: object) -> tuple[int, ZeroCopyMessage]:
        """As `ServerHost.restore`, with the state that comes of it."""
        self.host.restore(saved)
        return 0, ZeroCopyMessage(self.host.state)

    def numbers(self) -> Tensors:
        """As `ServerHost.numbers`."""
        return self.host.numbers()

    def saved_state(self) -> ZeroCopyMessage:
        """As `ServerHost.saved_state`."""
        return ZeroCopyMessage(self.host.saved_state())

    def send(self, clients: Sequence[int], new: bool = False) -> tuple[Any, ...]:
        """The messages to these clients (they may be `new`).

        Returns:
            For each client the number of its message and the size in bytes; then the messages, each once, with None
            behind them up to the number of clients.
        """
        numbers: dict[tuple[int | None, ...], int] = {}
        sent: dict[int, tuple[int, int]] = {}
        stored: list[ZeroCopyMessage | None] = []
        messages = self.host.join(clients) if new else self.host.downlinks(clients)
        for client, message in messages.items():
            key = identity(message)
            if key not in numbers:
                numbers[key] = len(stored)
                stored.append(ZeroCopyMessage(message))
            sent[client] = numbers[key], payload_bytes(message)
        return sent, *stored, *[None] * (len(clients) - len(stored))

    def send_global(self) -> tuple[bool, ZeroCopyMessage | None]:
        """Whether the method has a global model, and the model."""
        message = self.host.global_message()
        return message is not None, None if message is None else ZeroCopyMessage(message)
