"""pFedLA."""

from __future__ import annotations

from lightning_modules.base import ClientModule


class PFedLA(ClientModule):
    """Plain SGD from the client's own mixture (Ma et al. 2022, Algorithm 1, ClientUpdate). Judged as received.

    Notes:
        The paper's objective (eq. 7) is the loss of the mixtures w̄_i, and they are the output of Algorithm 1, so the
        judged model is the mixture as the server sends it, not the one after local training.
    """

    lockstep = True
    reported_phase = "received"
