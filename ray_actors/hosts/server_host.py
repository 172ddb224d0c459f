"""The home of the server rule and its state: a plain class, made a Ray actor where it is used."""

from __future__ import annotations

from collections.abc import Sequence

from pflsim.engine.diagnostics import RoundDiagnostics, diagnose
from pflsim.messages import Message, Uplink
from pflsim.run_folder.checkpoint import plain, restored
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors
from ray_actors.hosts.threads import torch_threads


class ServerHost:
    """Runs a server rule.

    Args:
        rule: the method's server.
        federation: what it knows before the first round.
        threads: torch threads of the fusion.
    """

    def __init__(self, rule: ServerRule, federation: Federation, threads: int = 1):
        self.rule, self.federation, self.threads = rule, federation, threads
        with torch_threads(threads):
            self.state = rule.init(federation)

    def downlinks(self, clients: Sequence[int]) -> dict[int, Message]:
        """The messages to these clients."""
        with torch_threads(self.threads):
            return self.rule.downlinks(self.state, clients)

    def join(self, clients: Sequence[int]) -> dict[int, Message]:
        """The messages to clients that are new."""
        with torch_threads(self.threads):
            return {client: self.rule.join(self.state, client) for client in clients}

    def fuse(self, *uplinks: Sequence[Uplink], matrices: bool = False) -> RoundDiagnostics:
        """Fuse what the hosts sent, in the order of the client ids whatever the order of arrival.

        Args:
            uplinks: of every call.
            matrices: whether what is returned has any.

        Returns:
            What is seen of it.
        """
        ordered = sorted((up for part in uplinks for up in part), key=lambda up: up.client)
        with torch_threads(self.threads):
            state = self.rule.fuse(self.state, ordered)
            seen = diagnose(self.rule, state, ordered, len(self.federation.clients), matrices)
        self.state = state  # now that nothing can fail any more
        return seen

    def global_message(self) -> Message | None:
        """The one model for all, or None where the method has none."""
        with torch_threads(self.threads):
            weights = self.rule.global_weights(self.state)
        return None if weights is None else Message(weights=weights)

    def numbers(self) -> Tensors:
        """The rule's own numbers."""
        return self.rule.numbers(self.state)

    def saved_state(self) -> object:
        """The rule's state in plain form."""
        return plain(self.state)

    def restore(self, saved: object) -> None:
        """Go back to a state that was saved in plain form.

        Raises:
            ValueError: it is no state of this rule.
        """
        self.state = restored(self.rule.init(self.federation), saved)


def identity(message: Message) -> tuple[int | None, ...]:
    """Equal for messages that are made of the very same sections, so that they need to be moved once only."""
    sections = (message.weights, message.prototypes, message.extra, message.numbers)
    return tuple(id(section) if section else None for section in sections)
