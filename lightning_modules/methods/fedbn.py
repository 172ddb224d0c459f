"""FedBN."""

from __future__ import annotations

from lightning_modules.base import ClientModule
from pflsim.params import Selector


class FedBN(ClientModule):
    """FedAvg without the normalisation layers, which stay with their client (Li et al. 2021, Algorithm 1).

    Judged as received: the mean of the other layers with the client's own normalisation, as the paper reports it.

    Notes:
        Scale, shift and running statistics all stay, under every setting of `buffers`. Normalisation layers are found
        by their class and may be of any kind; the paper has batch normalisation only.
    """

    lockstep = True
    shared = Selector(("net",), norms="without")
    reported_phase = "received"
