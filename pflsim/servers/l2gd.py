"""The server of L2GD: averages the models in aggregation rounds, which a coin decides."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pflsim.config.validate import Chance
from pflsim.fusion.means import column, uniform_mean
from pflsim.messages import Message, Uplink
from pflsim.seeding import coin
from pflsim.servers.base import Federation, GlobalModelRule
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        weights: x̄ of the last communication.
        holds: [N] bool, whether each client has received x̄.
        fused: the rounds so far, including those without uplinks.
        seed: the run's seed, for the coin.
    """

    weights: Tensors
    holds: Tensor
    fused: int
    seed: int


class L2GD(GlobalModelRule[State]):
    """x̄ = 1/n Σ x_i of the received models, sent in aggregation rounds (Hanzely & Richtárik 2020, Algorithm 1).

    Clients that have the current x̄ do not receive it again.

    Args:
        p: probability of an aggregation round, in [0, 1).

    Notes:
        With partial participation, x̄ is the mean over the participants of the last local round. Participants of an
        aggregation round receive it if they do not have it. A client that does not report in that local round does not
        count in x̄; if none does, x̄ stays the same. A client that does not report in an aggregation round is assumed
        not to have x̄ and receives it in the next one. The coin depends on the round only.
    """

    def __init__(self, *, p: Chance = 0.2):
        self.p = p

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model as x̄, which all clients have."""
        all_clients = torch.ones(len(federation.clients), dtype=torch.bool)
        return State(dict(federation.initial), all_clients, fused=0, seed=federation.seed)

    def downlink(self, state: State, client: int) -> Message:
        """Send x̄ in an aggregation round to a client that does not have it."""
        due = coin(state.seed, state.fused + 1, self.p) and not state.holds[client]
        return Message(weights=state.weights) if due else Message()

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Compute x̄ after the last local round before an aggregation; after one, record who has x̄."""
        state = replace(state, fused=state.fused + 1)
        sent = [u.weights for u in uplinks if u.weights]
        if sent:
            mean = {key: uniform_mean(column(sent, key)) for key in state.weights}
            return replace(state, weights=mean, holds=torch.zeros_like(state.holds))
        if not coin(state.seed, state.fused, self.p):
            return state
        holds = state.holds.clone()
        holds[[u.client for u in uplinks]] = True
        return replace(state, holds=holds)
