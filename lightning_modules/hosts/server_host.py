"""The host of the server rule: a plain class, which the Ray executor runs inside an actor."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from lightning_modules.hosts.attributes import unchanged_attributes
from lightning_modules.hosts.devices import torch_threads
from pflsim.engine.diagnostics import RoundDiagnostics, diagnose
from pflsim.fusion.blocks import products_on
from pflsim.messages import Message, Uplink
from pflsim.records.checkpoint_read import from_containers
from pflsim.records.checkpoint_write import to_containers
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors


class ServerHost:
    """Holds a server rule and its state.

    Args:
        rule: the method's server rule.
        federation: what the server knows before the first round.
        threads: number of torch's threads.
        device: where models are mixed, "cpu" or "cuda"; the state is on the CPU.

    Attributes:
        always_check: whether the rule's attributes are checked in every round; else up to the first fusion.
    """

    always_check = False

    def __init__(self, rule: ServerRule, federation: Federation, threads: int = 1, device: str = "cpu"):
        self.rule, self.federation, self.threads = rule, federation, threads
        self.device = torch.device(device)
        self._fused = False
        with torch_threads(threads):
            self.state = rule.init(federation)

    def downlinks(self, clients: Sequence[int], joining: bool = False) -> dict[int, Message]:
        """Return the downlinks of these clients, or their first ones if they are `joining`."""
        with torch_threads(self.threads), products_on(self.device), self._unchanged_attributes():
            if joining:
                return {client: self.rule.join(self.state, client) for client in clients}
            return self.rule.downlinks(self.state, clients)

    def fuse(self, *uplinks: Sequence[Uplink], matrices: bool = False, round_number: int = 0) -> RoundDiagnostics:
        """Fuse uplinks in the order of the client ids, and return the diagnostics of the round.

        Args:
            uplinks: in any order.
            matrices: also compute the matrices of the diagnostics.
            round_number: the round whose training they reply to; 0: they do not reply to training.
        """
        ordered = sorted((up for some in uplinks for up in some), key=lambda up: up.client)
        with torch_threads(self.threads), products_on(self.device), self._unchanged_attributes():
            given: Sequence[Uplink] = ordered
            if self.rule.attackers:
                known = self.rule.global_weights(self.state) or {}
                given = self.rule.attackers.colluded(ordered, known, round_number)
            before, given = self.rule.aggregated(self.state, given, round_number)
            state = self.rule.stepped(before, self.rule.fuse(before, given))
            diagnostics = diagnose(self.rule, state, ordered, len(self.federation.clients), matrices)
        self.state, self._fused = state, True  # last, so that a failure leaves it unchanged
        return diagnostics

    def _unchanged_attributes(self) -> AbstractContextManager[None]:
        return nullcontext() if self._fused and not self.always_check else unchanged_attributes(self.rule)

    def global_message(self) -> Message | None:
        """Return the global model, or None if the method has none."""
        with torch_threads(self.threads):
            weights = self.rule.global_weights(self.state)
        return None if weights is None else Message(weights=weights)

    def numbers(self) -> Tensors:
        """Return the rule's own numbers."""
        return self.rule.numbers(self.state)

    def saved_state(self) -> object:
        """Return the state as containers of tensors and numbers."""
        return to_containers(self.state)

    def restore(self, saved: object) -> None:
        """Load a state that `saved_state` returned.

        Raises:
            ValueError: it is not a state of this rule.
        """
        self.state = from_containers(type(self.state), saved)


def identity(message: Message) -> tuple[int | None, ...]:
    """Return a key that is equal for messages of the same sections, which need to be transferred only once."""
    sections = (message.weights, message.prototypes, message.extra, message.numbers)
    return tuple(id(section) if section else None for section in sections)
