"""The server of pFedMe: a step from the common model towards the clients' mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pflsim.config.validate import positive
from pflsim.fusion.layerwise import column
from pflsim.fusion.means import uniform_mean
from pflsim.messages import Message, Uplink
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class State:
    """What the server keeps.

    Args:
        weights: w.
        parameters: which of them are parameters; the others are running statistics.
    """

    weights: Tensors
    parameters: tuple[str, ...]


class PFedMe(ServerRule[State]):
    """w ← (1 − β)·w + β/S · Σ w_i over the S clients of the round (T Dinh et al. 2020, Algorithm 1).

    Args:
        beta: β > 0; 1 is the mean, more goes beyond it.

    Notes:
        The mean is uniform, as printed. Running statistics are states and no sums of updates, so of them it is the mean
        whatever β, without which a variance could become negative. A client that did not report is none of the S; a
        round without uplinks leaves the model as it is.
    """

    def __init__(self, *, beta: float = 1.0):
        self.beta = positive("method.beta", beta)

    def init(self, federation: Federation) -> State:
        """The common initial model."""
        return State(dict(federation.initial), tuple(k for u in federation.layouts["model"] for k in u.parameters))

    def downlink(self, state: State, client: int) -> Message:
        """The server's model, the same for everyone."""
        del client
        return Message(weights=state.weights)

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """A step of length β towards the mean of what was sent."""
        if not uplinks:
            return state
        sent, fused = [u.weights for u in uplinks], {}
        for key, old in state.weights.items():
            beta = self.beta if key in state.parameters else 1.0
            fused[key] = ((1 - beta) * old.double() + beta * uniform_mean(column(sent, key), torch.float64)).to(
                old.dtype
            )
        return replace(state, weights=fused)

    def global_weights(self, state: State) -> Tensors:
        """The common model w."""
        return state.weights
