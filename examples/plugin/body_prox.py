"""FedPer with a proximal term towards the received body; the head stays private."""

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import proximal
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.params import BODY


class BodyProx(ClientModule):
    """Minimises F(w) + mu/2 * |w_body - received|^2.

    Args:
        mu: weight of the proximal term, at least 0.
    """

    shared = BODY

    def __init__(self, net: Net, training: Training, *, mu: float = 0.1):
        super().__init__(net, training)
        self.mu = training.penalty("method.mu", mu)
        self.received = Anchor(self.shared_parameters())

    def objective(self, batch: Batch) -> Terms:
        """Return the loss of the task and the proximal term."""
        return {**super().objective(batch), "prox": proximal(self.received.pairs(self), self.mu)}
