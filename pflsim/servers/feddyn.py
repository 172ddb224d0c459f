"""The server of FedDyn: the mean of the clients' models, corrected by what they have moved so far."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pflsim.config.validate import Positive
from pflsim.fusion.means import column, uniform_mean
from pflsim.messages import Uplink
from pflsim.servers.base import Federation, GlobalModelRule
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        weights: θ, and running statistics.
        h: by the names of the parameters, in float64.
        clients: N.
    """

    weights: Tensors
    h: Tensors
    clients: int


class FedDyn(GlobalModelRule[State]):
    """h ← h − α/N · Σ (θ_i − θ) and θ ← 1/S · Σ θ_i − h/α over the S clients of the round (Acar et al. 2021, Alg. 1).

    Args:
        alpha: α > 0, the same as the clients'.

    Notes:
        The mean is uniform, as printed. Running statistics are the plain mean. A client that does not report does not
        count. A round without uplinks keeps the state.
    """

    def __init__(self, *, alpha: Positive):
        self.alpha = alpha

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model and h = 0."""
        names = [name for unit in federation.layouts["model"] for name in unit.parameters]
        zeros = {name: torch.zeros_like(federation.initial[name], dtype=torch.float64) for name in names}
        return State(dict(federation.initial), zeros, len(federation.clients))

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Update h and θ."""
        if not uplinks:
            return state
        weights, h, share = {}, {}, len(uplinks) / state.clients
        for key, old in state.weights.items():
            mean = uniform_mean(column([u.weights for u in uplinks], key), torch.float64)
            if key in state.h:
                h[key] = state.h[key] - self.alpha * share * (mean - old.double())
                mean = mean - h[key] / self.alpha
            weights[key] = mean.to(old.dtype)
        return replace(state, weights=weights, h=h)
