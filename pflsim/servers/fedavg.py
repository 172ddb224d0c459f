"""The server of FedAvg: the mean weighted by training examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pflsim.fusion.layerwise import column
from pflsim.fusion.means import weighted_mean
from pflsim.messages import Message, Uplink
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class State:
    """The server's model."""

    weights: Tensors


class FedAvg(ServerRule[State]):
    """w ← Σ n_i/n · w_i over the clients of the round (McMahan et al. 2017, Algorithm 1).

    A client that does not report does not count. A round without uplinks keeps the model.
    """

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model."""
        return State(dict(federation.initial))

    def downlink(self, state: State, client: int) -> Message:
        """Send the global model."""
        return Message(weights=state.weights)

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Average the received models, weighted by training examples."""
        if not uplinks:
            return state
        examples = torch.tensor([u.num_examples for u in uplinks], dtype=torch.float64)
        sent = [u.weights for u in uplinks]
        return State({key: weighted_mean(column(sent, key), examples) for key in state.weights})

    def global_weights(self, state: State) -> Tensors | None:
        """Return the global model, or None if nothing is shared."""
        return state.weights or None
