"""The server of FedDecomp: the mean of the shared parts."""

from collections.abc import Sequence
from typing import Literal

from pflsim.fusion.means import column, uniform_mean
from pflsim.messages import Uplink
from pflsim.servers.fedavg import FedAvg, State


class FedDecomp(FedAvg):
    """σ ← Σ p_i·σ_i over the clients of the round (Wu et al., ACM MM 2024).

    Args:
        weighting: "samples", p_i = n_i/n; or "uniform", p_i = 1/K, as printed.

    Notes:
        A client that does not report does not count. A round without uplinks keeps σ.
    """

    def __init__(self, *, weighting: Literal["samples", "uniform"] = "samples"):
        self.weighting = weighting

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Average the received σ_i."""
        if self.weighting == "samples" or not uplinks:
            return super().fuse(state, uplinks)
        return State({key: uniform_mean(column([u.weights for u in uplinks], key)) for key in state.weights})
