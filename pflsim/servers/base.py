"""The server rule: a method's server as explicit state and three pure functions."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from pflsim.attacks import Attackers
from pflsim.errors import SettingsError
from pflsim.fusion import ServerOptimizer
from pflsim.fusion.server_optimizers import server_step
from pflsim.messages import Message, Uplink
from pflsim.params import UnitKind, dtype_of
from pflsim.servers.aggregators import Aggregator
from pflsim.servers.privacy import Release
from pflsim.types import Axis, ClientInfo, Matrix, Tensors, Unit

State = TypeVar("State")
StateWithWeights = TypeVar("StateWithWeights", bound="HasWeights")
StateWithMoments = TypeVar("StateWithMoments", bound="MeanState")


class HasWeights(Protocol):
    """A state with the global model."""

    @property
    def weights(self) -> Tensors:
        """Tensors by name."""
        ...


@dataclass(frozen=True, slots=True)
class Federation:
    """What the server knows before the first round.

    Args:
        clients: all N clients, by id.
        initial: the initial shared tensors, equal for all clients.
        layouts: the fusion units of the shared tensors, for each kind of unit.
        seed: the run's seed.
        rounds: the number of rounds. A run whose initial state depends on it cannot be extended.
        num_classes: C.
        feature_width: D, the width of flattened features.
        head: a copy of the initial classifier, D features → C logits, for rules that train one.
    """

    clients: tuple[ClientInfo, ...]
    initial: Tensors
    layouts: Mapping[UnitKind, tuple[Unit, ...]] = field(default_factory=dict)
    seed: int = 0
    rounds: int = 1
    num_classes: int = 0
    feature_width: int = 0
    head: nn.Module = nn.Identity()

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the head's parameters."""
        return dtype_of(self.head)


class ServerRule(ABC, Generic[State]):
    """Base class of a method's server.

    A rule implements `init`, `downlink` and `fuse`. Its state is a frozen dataclass of tensors, numbers and mappings of
    them. No method modifies a state in place, so states can be saved, compared and restored.
    """

    unit: UnitKind = "module"
    """The kind of fusion unit that the rule mixes."""
    initial_round: bool = False
    """Whether all clients reply once before round 1, without training, and the rule fuses their replies."""

    attackers: Attackers | None = None
    """The malicious clients of the run."""

    def full_participation(self, round_number: int, rounds: int) -> bool:
        """Return whether all clients take part in this round, whatever `fraction` is. Must not depend on the state."""
        return False

    def surveys(self, round_number: int, rounds: int) -> bool:
        """Return whether all clients reply once more before this round. Must not depend on the state.

        They receive their downlinks, and what they do for the reply is discarded. The rule fuses the replies.
        """
        return False

    @abstractmethod
    def init(self, federation: Federation) -> State:
        """Return the state before round 1.

        Raises:
            SettingsError: the rule cannot serve this federation.
        """

    @abstractmethod
    def downlink(self, state: State, client: int) -> Message:
        """Return the message to a client at the start of a round.

        Return the same section objects for clients that receive the same values: they are transferred only once.
        """

    def downlinks(self, state: State, clients: Sequence[int]) -> dict[int, Message]:
        """Return the messages to several clients. Override it if computing them together is faster."""
        return {client: self.downlink(state, client) for client in clients}

    def join(self, state: State, client: int) -> Message:
        """Return the message to a client that joins after the last round and is unknown to the state.

        The default is the global model if there is one, else the message of `downlink`.
        """
        weights = self.global_weights(state)
        return self.downlink(state, client) if weights is None else Message(weights=weights)

    @abstractmethod
    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Return the state after a round.

        Called once for every round, for the initial round and for surveys. Clients of the round may be missing. Without
        uplinks the models stay as they are, but counters of rounds advance.

        Args:
            state: the state before the round; must not be modified.
            uplinks: the replies, ordered by client id. Copy what the state keeps of their tensors (`snapshot`).
        """

    def aggregated(self, state: State, uplinks: Sequence[Uplink], round_number: int) -> tuple[State, Sequence[Uplink]]:
        """Return the state and the uplinks that a fusion gets: those of the run's aggregator, if it has one.

        Args:
            state: the state before the round.
            uplinks: the replies, ordered by client id.
            round_number: the round whose training they reply to; 0: they do not reply to training.
        """
        return state, uplinks

    def stepped(self, before: State, after: State) -> State:
        """Return the state after a fusion and the step of the run's server optimiser, if the rule takes one."""
        return after

    def global_weights(self, state: State) -> Tensors | None:
        """Return the global model, or None if the method has none."""
        return None

    def numbers(self, state: State) -> Tensors:
        """Return the rule's internal values after a fusion for the trace, e.g. `zeta/<unit>` to a tensor."""
        return {}

    def diagnostics(self, state: State) -> Sequence[Matrix]:
        """Return matrices to display after a fusion, such as mixing weights between clients."""
        return ()


class GlobalModelRule(ServerRule[StateWithWeights]):
    """Base class of rules whose state has the global model as `weights`, which every client receives."""

    def downlink(self, state: StateWithWeights, client: int) -> Message:
        """Send the global model."""
        return Message(weights=state.weights)

    def global_weights(self, state: StateWithWeights) -> Tensors | None:
        """Return the global model."""
        return state.weights


@dataclass(frozen=True, slots=True)
class MeanState:
    """A state whose model is a mean of the clients' models.

    Args:
        weights: the global model.
        moments: of the server optimiser, by parameter and name, in float64; empty without one.
        steps: the number of its steps.
        memory: of the aggregator.
    """

    weights: Tensors
    moments: Mapping[str, Tensors] = field(default_factory=dict, kw_only=True)
    memory: Tensors = field(default_factory=dict, kw_only=True)
    steps: int = field(default=0, kw_only=True)


class MeanRule(GlobalModelRule[StateWithMoments]):
    """Base class of rules whose model is a mean of the clients' models, which a server optimiser may step towards."""

    optimizer: ServerOptimizer = ServerOptimizer()
    """The run's server optimiser."""
    parameters: Collection[str] = ()
    """What it moves: the shared parameters. Other tensors, such as running statistics, are the mean."""
    aggregator: Aggregator | None = None
    """The run's aggregator; None: the rule takes a mean of its own."""
    privacy: Release | None = None
    """The differential privacy of the run's clients; None: there is none."""

    def aggregated(
        self, state: StateWithMoments, uplinks: Sequence[Uplink], round_number: int
    ) -> tuple[StateWithMoments, Sequence[Uplink]]:
        """Return one uplink, whose weights are the model and the aggregate of the changes, and its client is -1.

        Raises:
            SettingsError: an uplink has more than weights, or other tensors than the model has.
        """
        if not (self.privacy or self.aggregator) or not round_number or not (uplinks or self.privacy):
            return state, uplinks
        known = {name: value.double() for name, value in state.weights.items()}
        if not known or any(
            up.prototypes or up.extra or up.numbers or up.weights.keys() != known.keys() for up in uplinks
        ):
            which = "privacy=client" if self.privacy else "an aggregator"
            raise SettingsError(f"{which} needs clients that send weights, and nothing else; leave it out")
        changes = [{name: up.weights[name].double() - value for name, value in known.items()} for up in uplinks]
        if self.privacy:
            shapes = {name: value.shape for name, value in known.items()}
            change, memory = self.privacy(changes, shapes, state.memory, round_number)
        else:
            assert self.aggregator is not None
            change, memory = self.aggregator(changes, state.memory)
        weights = {name: (value + change[name]).to(state.weights[name].dtype) for name, value in known.items()}
        one = Uplink(weights, client=-1, num_examples=max(1, sum(up.num_examples for up in uplinks)))
        return replace(state, memory=memory), [one]

    def diagnostics(self, state: StateWithMoments) -> Sequence[Matrix]:
        """Return the clip norm of the next round, [1, 1], with `privacy.adapt`."""
        if self.privacy is None or "clip" not in state.memory:
            return ()
        value = state.memory["clip"].float().reshape(1, 1).numpy()
        return (Matrix("clip_norm", "Clip norm of privacy=client", Axis("server"), Axis("clip norm"), value),)

    def stepped(self, before: StateWithMoments, after: StateWithMoments) -> StateWithMoments:
        """Move the model by the optimiser's step instead of to the mean; a fusion that keeps it makes no step."""
        after = replace(after, memory=before.memory) if before.memory else after
        if self.optimizer.name == "none" or after.weights is before.weights:
            return after
        weights, moments, number = dict(after.weights), dict[str, Tensors](), before.steps + 1
        for name in self.parameters:
            old = before.weights[name].double()
            change = weights[name].double() - old
            step, moments[name] = server_step(self.optimizer, change, before.moments.get(name, {}), number)
            weights[name] = (old + step).to(weights[name].dtype)
        return replace(after, weights=weights, moments=moments, steps=number)


def between_clients(numbers: Mapping[str, Tensor], kind: str, title: str) -> list[Matrix]:
    """Return a rule's numbers `<kind>/<unit>` or `<kind>`, [N, N] with receivers as rows, as matrices."""
    found = {name: value for name, value in numbers.items() if name.partition("/")[0] == kind}
    rows, columns = Axis("receiver"), Axis("sender")
    return [Matrix(name, title, rows, columns, value.float().cpu().numpy()) for name, value in found.items()]


def memberships(groups: Tensor, clusters: int) -> list[Matrix]:
    """Return [M, N] with 1 where a client (column) is in a cluster (row). Clients without a cluster are negative."""
    values = (groups.cpu() == torch.arange(clusters)[:, None]).float().numpy()
    return [Matrix("clusters", "Clusters of the clients", Axis("cluster"), Axis("client"), values, (0.0, 1.0))]
