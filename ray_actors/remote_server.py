"""The server actor. It imports nothing of Lightning: its process is up sooner and smaller for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray import ObjectRef

from pflsim.messages import Uplink
from pflsim.payload import payload_bytes
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors
from ray_actors.parcel import Parcel
from ray_actors.server_host import ServerHost, identity


class RemoteServer:
    """Starts empty, to be settled for a run. Its messages stay in the object store; only references leave it."""

    def settle(self, rule: ServerRule[Any], federation: Federation, threads: int) -> None:
        """Build the server of a run in place of any that was here."""
        self.host = ServerHost(rule, federation, threads)

    def fuse(self, *uplinks: Sequence[Uplink]) -> int:
        """As `ServerHost.fuse`."""
        return self.host.fuse(*uplinks)

    def numbers(self) -> Tensors:
        """As `ServerHost.numbers`."""
        return self.host.numbers()

    def saved_state(self) -> Parcel:
        """As `ServerHost.saved_state`."""
        return Parcel(self.host.saved_state())

    def send(self, clients: Sequence[int], new: bool = False) -> dict[int, tuple[ObjectRef, int]]:
        """For each client (they may be `new`) a reference to its message and the size in bytes; a message for many is
        stored once.
        """
        stored: dict[tuple[int | None, ...], tuple[ObjectRef, int]] = {}
        sent: dict[int, tuple[ObjectRef, int]] = {}
        messages = self.host.join(clients) if new else self.host.downlinks(clients)
        for client, message in messages.items():
            key = identity(message)
            if key not in stored:
                stored[key] = ray.put(Parcel(message)), payload_bytes(message)
            sent[client] = stored[key]
        return sent

    def send_global(self) -> ObjectRef | None:
        """A reference to the global model, or None where the method has none."""
        message = self.host.global_message()
        return None if message is None else ray.put(Parcel(message))
