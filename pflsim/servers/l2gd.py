"""The server of L2GD: the mean of the models, when the coin turns to aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pflsim.config.validate import chance
from pflsim.fusion.layerwise import column
from pflsim.fusion.means import uniform_mean
from pflsim.messages import Message, Uplink
from pflsim.seeding import coin
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class State:
    """What the server keeps.

    Args:
        weights: x̄ of the last communication.
        holds: [N] bool, which clients are known to have it.
        fused: rounds so far, those without any uplink too.
        seed: the run's, for the coin.
    """

    weights: Tensors
    holds: Tensor
    fused: int
    seed: int


class L2GD(ServerRule[State]):
    """x̄ = 1/n Σ x_i of the models that come up, sent in aggregation rounds (Hanzely & Richtárik 2020, Algorithm 1).

    A client that already has the current x̄ is not sent it again.

    Args:
        p: probability of an aggregation round, in [0, 1).

    Notes:
        With partial participation x̄ is the mean over the participants of the last local round, and goes to the
        participants of each aggregation round who lack it. A client that did not report in that local round does not
        count in x̄; where nobody did, x̄ stays that of the last communication. One that did not report in an aggregation
        round is taken not to have x̄, and is sent it in the next. The coin goes by the rounds, whoever reports.
    """

    def __init__(self, *, p: float = 0.2):
        self.p = chance("method.p", p)

    def init(self, federation: Federation) -> State:
        """The common initial model is its own mean, and everyone has it."""
        everyone = torch.ones(len(federation.clients), dtype=torch.bool)
        return State(dict(federation.initial), everyone, fused=0, seed=federation.seed)

    def downlink(self, state: State, client: int) -> Message:
        """x̄, in an aggregation round, to a client that has it not."""
        due = coin(state.seed, state.fused + 1, self.p) and not state.holds[client]
        return Message(weights=state.weights) if due else Message()

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """A new mean after the last local round before an aggregation, which then nobody has yet."""
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

    def global_weights(self, state: State) -> Tensors:
        """x̄ of the last communication."""
        return state.weights
