"""The server of FedDBE: FedAvg, and the global mean of features."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from pflsim.fusion.means import example_means, weighted_mean
from pflsim.messages import Message, Uplink
from pflsim.servers.base import Federation, MeanRule, MeanState
from pflsim.types import Tensors

MEAN = "mean_features"
"""Key of a mean of features [D] among the extra tensors of uplinks of the initial round and of downlinks."""


@dataclass(frozen=True, slots=True)
class State(MeanState):
    """The server's state.

    Args:
        extra: the global mean of features as `mean_features` [D]; empty before the initial round.
    """

    extra: Tensors = field(default_factory=dict)


class FedDBE(MeanRule[State]):
    """Averages the nets as FedAvg does; m_g = Σ n_i/n · m_i over the clients of the initial round (Zhang et al. 2023).

    Notes:
        m_g does not change after the initial round. If no client replies in it, there is no m_g, and the clients train
        without its term.
    """

    initial_round = True

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model."""
        return State(dict(federation.initial))

    def downlink(self, state: State, client: int) -> Message:
        """Send the global model and the global mean of features."""
        return Message(weights=state.weights, extra=state.extra)

    join = downlink

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Average the received models or, in the initial round, the received means; weighted by training examples."""
        opening = [u for u in uplinks if MEAN in u.extra]
        if opening:
            examples = torch.tensor([u.num_examples for u in opening])
            return replace(state, extra={MEAN: weighted_mean([u.extra[MEAN] for u in opening], examples)})
        return replace(state, weights=example_means(uplinks, state.weights)) if uplinks else state

    def numbers(self, state: State) -> Tensors:
        """Return `mean_features` [D]."""
        return state.extra
