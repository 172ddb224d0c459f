"""FedALP: a mixture of the group's and the common model, layer by layer."""

from lightning_modules.base import ClientModule


class FedALP(ClientModule):
    """Trains the received model by plain SGD (Xie et al. 2022, Algorithm 1, ClientUpdate).

    Reported model: as received, the mixture of the group's model and the common one (eq. 9).

    Notes:
        The client sends the trained weights instead of their change. The server knows what it sent, and the number of
        bytes is the same.
    """

    lockstep = True
    reported_phase = "received"
