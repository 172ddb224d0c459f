"""The server of pFedPM: global class features."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pflsim.fusion.prototypes import Weighting, fuse_prototypes, keep_missing
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class State:
    """The global features: means [C, D] and counts [C]; the count of a class is 0 until a client reports it."""

    features: Prototypes


class PFedPM(ServerRule[State]):
    """C̄_j = Σ_i D_ij·C_ij / Σ_i D_ij over the clients of the round that hold class j (Xing et al., eq. 7).

    Args:
        prototype_weighting: weights of the clients' class means: "samples" (eq. 7), "uniform", the same for all that
            hold the class, or "printed", eq. 7 as it is printed.

    Notes:
        Eq. 7 also divides by the number of those clients, which shrinks each feature; only "printed" does. A client
        that does not report does not count. A class that no client of a round holds keeps its global feature. Algorithm
        1 does not specify the initial global features; there are none before round 1.
    """

    def __init__(self, *, prototype_weighting: Weighting = "samples"):
        self.weighting: Weighting = prototype_weighting

    def init(self, federation: Federation) -> State:
        """Return the state without features."""
        means = torch.zeros(federation.num_classes, federation.feature_width, dtype=federation.dtype)
        return State(Prototypes(means, torch.zeros(federation.num_classes, dtype=torch.int64)))

    def downlink(self, state: State, client: int) -> Message:
        """Send the global features."""
        return Message(prototypes=state.features)

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Average the received class means; other classes keep their features."""
        if not uplinks:
            return state
        sent = [u.prototypes for u in uplinks if u.prototypes is not None]
        if len(sent) < len(uplinks):
            missing = next(u.client for u in uplinks if u.prototypes is None)
            raise ValueError(f"client {missing} sent no class features")
        return State(keep_missing(fuse_prototypes(sent, self.weighting), state.features))

    def numbers(self, state: State) -> Tensors:
        """Return `gfr` [C, D] and `gfr_counts` [C]."""
        return {"gfr": state.features.means, "gfr_counts": state.features.counts}
