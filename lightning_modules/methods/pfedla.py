"""pFedLA: layer-wise mixtures, weighted by hypernetworks on the server."""

from lightning_modules.base import ClientModule


class PFedLA(ClientModule):
    """Trains the client's mixture by plain SGD (Ma et al. 2022, Algorithm 1, ClientUpdate).

    Reported model: as received, since the paper's objective (eq. 7) is the loss of the mixtures w̄_i, which are also the
    output of Algorithm 1.
    """

    lockstep = True
    reported_phase = "received"
