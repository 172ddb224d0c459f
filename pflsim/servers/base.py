"""What a server rule is: explicit state, and three pure functions on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor, nn

from pflsim.messages import Message, Uplink
from pflsim.params import UnitKind
from pflsim.types import Axis, ClientInfo, Matrix, Tensors, Unit

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Federation:
    """What the server knows before the first round.

    Args:
        clients: all N clients, by id.
        initial: the shared tensors everyone starts from.
        layouts: the fusion units of what is shared, for each kind of unit.
        seed: the run's seed.
        rounds: how many rounds are planned.
        num_classes: C.
        feature_width: D, the width of flattened features.
        head: a copy of the initial classifier, D features → C logits, for rules that train one; None: not known.
    """

    clients: tuple[ClientInfo, ...]
    initial: Tensors
    layouts: Mapping[UnitKind, tuple[Unit, ...]] = field(default_factory=dict)
    seed: int = 0
    rounds: int = 1
    num_classes: int = 0
    feature_width: int = 0
    head: nn.Module | None = None


class ServerRule(ABC, Generic[State]):
    """A method's server.

    The state is a frozen dataclass of tensors, numbers and mappings of them; nothing is changed in place, so that a
    state can be saved, compared and gone back to.
    """

    unit: UnitKind = "module"
    """What a fusion unit is to this rule."""
    initial_round: bool = False
    """Whether all clients reply once before round 1, as they are, and the rule fuses that."""

    def full_participation(self, round_number: int, rounds: int) -> bool:
        """Whether all clients take part in this round, however few the settings ask for; a fixed rule."""
        del round_number, rounds
        return False

    @abstractmethod
    def init(self, federation: Federation) -> State:
        """The state before round 1. Raises SettingsError where the federation cannot be served."""

    @abstractmethod
    def downlink(self, state: State, client: int) -> Message:
        """What a client is sent at the start of a round. Clients that are sent the same get the same section objects,
        which are then moved once.
        """

    def downlinks(self, state: State, clients: Sequence[int]) -> dict[int, Message]:
        """What several clients are sent; for rules that do it better for all at once than one by one."""
        return {client: self.downlink(state, client) for client in clients}

    def join(self, state: State, client: int) -> Message:
        """What a client is sent that is new when the training is over, and in none of the state's tables.

        By default the one model for all, where there is one, or nothing.
        """
        del client
        weights = self.global_weights(state)
        return Message() if weights is None else Message(weights=weights)

    def models_sent(self, joining: bool = False) -> int:
        """The most models in one message, to a client of a round or to one that joins; memory goes by it."""
        del joining
        return 1

    @abstractmethod
    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """The state after a round; uplinks come in the order of the client ids. Their tensors are lent for the call:
        what the state keeps of them is copied.

        Any of a round's clients may be missing. Without uplinks all that is sent stays as it is, but what counts rounds
        counts this one too: it is called once for every round, and for the opening.
        """

    def global_weights(self, state: State) -> Tensors | None:
        """The one model for all that the server can offer, or None where the method has none."""
        del state
        return None

    def numbers(self, state: State) -> Tensors:
        """The rule's own numbers after a fusion, for the trace: names like `zeta/<unit>` to tensors."""
        del state
        return {}

    def diagnostics(self, state: State) -> Sequence[Matrix]:
        """Matrices to look at after a fusion, such as who is given how much of whom."""
        del state
        return ()


def between_clients(numbers: Mapping[str, Tensor], kind: str, title: str) -> list[Matrix]:
    """A rule's numbers `<kind>/<unit>` or `<kind>`, [N, N] with receivers as rows, as matrices."""
    found = {name: value for name, value in numbers.items() if name.partition("/")[0] == kind}
    rows, columns = Axis("receiver"), Axis("sender")
    return [Matrix(name, title, rows, columns, value.float().cpu().numpy()) for name, value in found.items()]
