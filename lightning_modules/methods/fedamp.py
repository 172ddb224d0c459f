"""FedAMP: attentive mixtures of the clients' models."""

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import proximal
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.config.validate import NonNegative, Positive


class FedAMP(ClientModule):
    """Minimises F(w) + λ/(2α)·‖w − u_i‖², where u_i is the client's mixture (Huang et al. 2021, eq. 6).

    Reported model: personal, after local training.

    Args:
        net: body and head.
        training: the run's local training settings.
        lam: λ ≥ 0, with lr·λ/α ≤ 2.
        alpha: α > 0, also used by the server.

    Notes:
        Local training starts from u_i, as in the authors' experiments; the paper does not specify it.
    """

    lockstep = True

    def __init__(self, net: Net, training: Training, *, lam: NonNegative = 1.0, alpha: Positive):
        super().__init__(net, training)
        strength = lam / alpha
        self.coefficient = training.penalty("method.lam/method.alpha", strength)
        self.received = Anchor(self.shared_parameters())

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy and the penalty towards u_i."""
        return {**super().objective(batch), "prox": proximal(self.received.pairs(self), self.coefficient)}
