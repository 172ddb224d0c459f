"""FedProx: FedAvg with a proximal term."""

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import proximal
from lightning_modules.nets.net import Net
from lightning_modules.training import Training


class FedProx(ClientModule):
    """Minimises F(w) + μ/2·‖w − w_g‖², where w_g is the received model (Li et al. 2020, eq. 2).

    Reported model: global.

    Args:
        net: body and head.
        training: the run's local training settings.
        mu: μ ≥ 0, with lr·μ ≤ 2; 0 is FedAvg.
    """

    lockstep = True
    token_targets = True
    private_steps = True
    reported_model = "global"

    def __init__(self, net: Net, training: Training, *, mu: float = 0.001):
        super().__init__(net, training)
        self.mu = training.penalty("method.mu", mu)
        self.received = Anchor(self.shared_parameters())

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy and the proximal term."""
        return {**super().objective(batch), "prox": proximal(self.received.pairs(self), self.mu)}
