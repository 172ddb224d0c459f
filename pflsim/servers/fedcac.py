"""The server of FedCAC: a mean of all clients, and for each client one of those with overlapping marks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pflsim.config.settings import Count
from pflsim.fusion.attentive import mix
from pflsim.fusion.masks import collaboration, from_bits, overlaps
from pflsim.fusion.means import column, example_means
from pflsim.messages import Message, Uplink
from pflsim.servers.base import Federation, GlobalModelRule
from pflsim.types import Tensors

CUSTOMISED = "customised"
"""Key among a downlink's numbers: the model is merged with u_i."""


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        weights: g.
        customised: M_i⊙u_i + (1 − M_i)⊙g of each client of the last round.
        fused: t, the rounds so far, including those without uplinks.
    """

    weights: Tensors
    customised: Mapping[int, Tensors] = field(default_factory=dict)
    fused: int = 0


class FedCAC(GlobalModelRule[State]):
    """g ← Σ n_i/n · θ_i, and u_i, the uniform mean of θ_j over i and the clients with O_ij ≥ T (Wu et al., ICCV 2023).

    O_ij is the overlap of the marks M_i and M_j, and T = Ō + t/β·(O* − Ō), with the mean Ō and the largest O* of the
    overlaps in round t. A client receives M_i⊙u_i + (1 − M_i)⊙g.

    Args:
        beta: β, the round in which T is O*; after it no other client reaches T, unless all overlaps are equal. At
            least 1.

    Notes:
        - O_ij = 1 − ‖M_i − M_j‖₁/(‖M_i‖₁ + ‖M_j‖₁), which is the paper's with masks of one size.
        - Only clients of the last round have a u_i. Others receive g.
        - A client that does not report does not count. A round without uplinks counts, and keeps g and all u_i.
    """

    def __init__(self, *, beta: Count = 100):
        self.beta = beta

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model."""
        return State(dict(federation.initial))

    def downlink(self, state: State, client: int) -> Message:
        """Send the client's merged model, marked as such; g if it was not in the last round."""
        if client in state.customised:
            return Message(weights=state.customised[client], numbers={CUSTOMISED: 1.0})
        return Message(weights=state.weights)

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Compute g and all u_i, and merge them."""
        state = replace(state, fused=state.fused + 1)
        if not uplinks:
            return state
        sent = [u.weights for u in uplinks]
        masks = [{key: from_bits(bits, u.weights[key].shape) for key, bits in u.extra.items()} for u in uplinks]
        shares = collaboration(overlaps(masks), state.fused / self.beta)
        weights = example_means(uplinks, state.weights)
        customised: dict[int, dict[str, Tensor]] = {u.client: {} for u in uplinks}
        for key, g in weights.items():
            for own, mask, mean in zip(customised.values(), masks, mix(shares, column(sent, key)), strict=True):
                own[key] = torch.where(mask[key], mean, g)
        return replace(state, weights=weights, customised=customised)
