"""FedBN: FedAvg with private normalisation layers."""

from lightning_modules.base import ClientModule
from pflsim.params import Selector


class FedBN(ClientModule):
    """Shares all layers but the normalisation layers (Li et al. 2021, Algorithm 1).

    Reported model: as received, the averaged layers with the client's own normalisation layers, as in the paper.

    Notes:
        Scale, shift and running statistics stay private under every setting of `buffers`. Normalisation layers of all
        kinds are found by their class; the paper uses batch normalisation only.
    """

    lockstep = True
    shared = Selector(("net",), norms="without")
    reported_phase = "received"
