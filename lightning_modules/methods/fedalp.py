"""FedALP."""

from __future__ import annotations

from lightning_modules.base import ClientModule


class FedALP(ClientModule):
    """Plain SGD from what the server sent (Xie et al. 2022, Algorithm 1, ClientUpdate).

    Judged by what it is sent: the mixture of its group's model and the common one (eq. 9).

    Notes:
        The trained weights travel up, not their difference to those received, which the server knows: the same bytes.
    """

    lockstep = True
    reported_phase = "received"
