"""The server of FedAvg: the mean weighted by training examples."""

from collections.abc import Sequence

from pflsim.fusion.means import example_means
from pflsim.messages import Uplink
from pflsim.servers.base import Federation, MeanRule
from pflsim.servers.base import MeanState as State
from pflsim.types import Tensors


class FedAvg(MeanRule[State]):
    """w ← Σ n_i/n · w_i over the clients of the round (McMahan et al. 2017, Algorithm 1).

    A client that does not report does not count. A round without uplinks keeps the model.
    """

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model."""
        return State(dict(federation.initial))

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Average the received models, weighted by training examples."""
        return State(example_means(uplinks, state.weights)) if uplinks else state

    def global_weights(self, state: State) -> Tensors | None:
        """Return the global model, or None if nothing is shared."""
        return state.weights or None
