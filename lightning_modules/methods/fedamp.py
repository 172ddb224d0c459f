"""FedAMP."""

from __future__ import annotations

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import proximal
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.config.validate import non_negative, positive


class FedAMP(ClientModule):
    """F(w) + λ/(2α)·‖w − u_i‖² with u_i the client's own mixture (Huang et al. 2021, eq. 6). Judged after training.

    Args:
        net: body and head.
        training: the run's local training settings.
        lam: λ ≥ 0, with lr·λ/α ≤ 2.
        alpha: α > 0, the same that the server mixes with.

    Notes:
        Local training starts from u_i, as the authors' experiments do; the paper leaves the start open.
    """

    lockstep = True

    def __init__(self, net: Net, training: Training, *, lam: float = 1.0, alpha: float):
        super().__init__(net, training)
        strength = non_negative("method.lam", lam) / positive("method.alpha", alpha)
        self.coefficient = training.penalty("method.lam/method.alpha", strength)
        self.received = Anchor(self.shared_parameters())

    def objective(self, batch: Batch) -> Terms:
        """Cross-entropy and the pull towards u_i."""
        return {**super().objective(batch), "prox": proximal(self.received.pairs(self), self.coefficient)}
