"""The server of FedSelect: the mean of every entry over the clients that share it."""

from collections.abc import Sequence
from dataclasses import replace

from pflsim.fusion.masks import from_bits, mean_of_sharers
from pflsim.fusion.means import column, uniform_mean
from pflsim.messages import Uplink
from pflsim.servers.fedavg import FedAvg, State


class FedSelect(FedAvg):
    """g_e ← 1/N_e · Σ θ_ie over the N_e clients of the round whose entry e is shared (Tamirisa et al. 2024).

    An uplink has the shared entries of each tensor, and in `extra` the mask of private ones, in bits, of those tensors
    that may have some.

    Notes:
        The mean is uniform, as in the authors' program. An entry that no client of the round shares keeps its value. A
        client that does not report does not count. A round without uplinks keeps the model. A server optimiser moves
        only entries whose mean differs from their value.
    """

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Average every entry over the clients that share it."""
        if not uplinks:
            return state
        sent, weights = [u.weights for u in uplinks], {}
        for key, old in state.weights.items():
            if key in uplinks[0].extra:
                private = [from_bits(u.extra[key], old.shape) for u in uplinks]
                weights[key] = mean_of_sharers([tensors[key] for tensors in sent], private, old)
            else:
                weights[key] = uniform_mean(column(sent, key))
        return State(weights)

    def stepped(self, before: State, after: State) -> State:
        """Move the entries that clients share by the server optimiser's step."""
        moved, old = super().stepped(before, after), before.weights
        kept = {key: value.where(after.weights[key] != old[key], old[key]) for key, value in moved.weights.items()}
        return replace(moved, weights=kept)
