"""The server of Local, which does nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from pflsim.messages import Message, Uplink
from pflsim.servers.base import Federation, ServerRule


@dataclass(frozen=True, slots=True)
class State:
    """The empty state."""


class Local(ServerRule[State]):
    """Sends nothing and fuses nothing."""

    def init(self, federation: Federation) -> State:
        """Return the empty state."""
        return State()

    def downlink(self, state: State, client: int) -> Message:
        """Send an empty message."""
        return Message()

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Return the state unchanged."""
        return state
