"""The server of Local: none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pflsim.messages import Message, Uplink
from pflsim.servers.base import Federation, ServerRule


@dataclass(frozen=True, slots=True)
class State:
    """Nothing is kept."""


class Local(ServerRule[State]):
    """Sends nothing and fuses nothing: a client that did not report is missed by nobody."""

    def init(self, federation: Federation) -> State:
        """Nothing."""
        del federation
        return State()

    def downlink(self, state: State, client: int) -> Message:
        """An empty message, which costs nothing."""
        del state, client
        return Message()

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Nothing changes."""
        del uplinks
        return state
