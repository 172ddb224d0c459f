"""pFedHN."""

from __future__ import annotations

from lightning_modules.base import ClientModule


class PFedHN(ClientModule):
    """Plain SGD from the weights that the server generates (Shamsian et al. 2021, Algorithm 1). Judged as received.

    Notes:
        The paper's objective (eq. 3) is the loss of the generated weights, which it evaluates without local training.
        The trained weights travel up, not their difference to those received, which the server knows: the same bytes.
    """

    lockstep = True
    reported_phase = "received"
