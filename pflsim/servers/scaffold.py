"""The server of SCAFFOLD: the mean of the clients' changes, and of their control variates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pflsim.config.validate import Positive
from pflsim.fusion.means import column, uniform_mean
from pflsim.messages import Message, Uplink
from pflsim.servers.base import Federation, MeanRule, MeanState
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class State(MeanState):
    """The server's state.

    Args:
        control: c, by the names of the parameters.
        clients: N.
    """

    control: Tensors
    clients: int


class Scaffold(MeanRule[State]):
    """x ← x + η_g/S · Σ (y_i − x) and c ← c + 1/N · Σ Δc_i over the S clients of the round (Karimireddy et al. 2020).

    Args:
        server_lr: η_g > 0; with 1, x is the mean of the y_i.

    Notes:
        The means are uniform, as printed. Running statistics are the plain mean, since
        a larger η_g could make a variance negative. A client that does not report does not count. A round without
        uplinks keeps the state.
    """

    def __init__(self, *, server_lr: Positive = 1.0):
        self.server_lr = server_lr

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model and c = 0."""
        names = [name for unit in federation.layouts["model"] for name in unit.parameters]
        control = {name: torch.zeros_like(federation.initial[name]) for name in names}
        return State(dict(federation.initial), control, len(federation.clients))

    def downlink(self, state: State, client: int) -> Message:
        """Send x and c."""
        return Message(weights=state.weights, extra=state.control)

    join = downlink  # the c_i of a newcomer is 0

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Move x by the mean change of the clients of the round, and c by their share of all clients."""
        if not uplinks:
            return state
        weights, control = {}, {}
        for key, old in state.weights.items():
            rate = self.server_lr if key in state.control else 1.0
            mean = uniform_mean(column([u.weights for u in uplinks], key), torch.float64)
            weights[key] = ((1 - rate) * old.double() + rate * mean).to(old.dtype)
        for key, old in state.control.items():
            mean = uniform_mean(column([u.extra for u in uplinks], key), torch.float64)
            control[key] = (old.double() + len(uplinks) / state.clients * mean).to(old.dtype)
        return replace(state, weights=weights, control=control)
