"""The server of pFedMe: moves the global model towards the clients' mean."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pflsim.config.validate import Positive
from pflsim.fusion.means import column, uniform_mean
from pflsim.messages import Uplink
from pflsim.servers.base import Federation, MeanRule, MeanState


@dataclass(frozen=True, slots=True)
class State(MeanState):
    """The server's state.

    Args:
        parameters: the keys of parameters; the other tensors are running statistics.
    """

    parameters: tuple[str, ...]


class PFedMe(MeanRule[State]):
    """w ← (1 − β)·w + β/S · Σ w_i over the S clients of the round (T Dinh et al. 2020, Algorithm 1).

    Args:
        beta: β > 0, the step towards the mean; 1 is the mean.

    Notes:
        The mean is uniform, as printed. Running statistics always use β = 1, since a larger β could make a variance
        negative. A client that does not report does not count. A round without uplinks keeps the model.
    """

    def __init__(self, *, beta: Positive = 1.0):
        self.beta = beta

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model."""
        return State(dict(federation.initial), tuple(k for u in federation.layouts["model"] for k in u.parameters))

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Take a step of length β towards the mean of the received models."""
        if not uplinks:
            return state
        sent, fused = [u.weights for u in uplinks], {}
        for key, old in state.weights.items():
            beta = self.beta if key in state.parameters else 1.0
            mean = uniform_mean(column(sent, key), torch.float64)
            fused[key] = ((1 - beta) * old.double() + beta * mean).to(old.dtype)
        return replace(state, weights=fused)
