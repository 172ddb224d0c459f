"""pFedHN: a server-side hypernetwork generates the clients' models."""

from lightning_modules.base import ClientModule


class PFedHN(ClientModule):
    """Trains the generated weights by plain SGD (Shamsian et al. 2021, Algorithm 1).

    Reported model: as received, since the paper's objective (eq. 3) is the loss of the generated weights.

    Notes:
        The client sends the trained weights instead of their change. The server knows what it sent, and the number of
        bytes is the same.
    """

    lockstep = True
    reported_phase = "received"
