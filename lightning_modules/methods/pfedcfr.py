"""pFedCFR: attentive mixing of the first units, the common mean of the others."""

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import proximal
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.config.validate import NonNegative, Positive
from pflsim.params import Threshold, UnitKind, resolve_threshold


class PFedCFR(ClientModule):
    """Minimises F(w) + Σ_{l≤r} λ/(2α)·‖w_l − ŵ_l‖² + Σ_{l>r} μ/2·‖w_l − w̄_l‖² (Yang et al., eq. 15, Algorithm 1).

    ŵ is the client's own mixture and w̄ the common mean, both as received. Reported model: personal, after local
    training (Algorithm 1, output).

    Args:
        net: body and head.
        training: the run's local training settings.
        lam: λ ≥ 0, penalty towards the mixture, with lr·λ/α ≤ 2.
        mu: μ ≥ 0, penalty towards the mean, with lr·μ ≤ 2.
        alpha: α > 0, also used by the server.
        r: threshold: the number of mixed units (an integer), a fraction of all units, or "body".
        unit: kind of fusion unit: module, tensor or model.

    Notes:
        - l ≤ r is inclusive, as in eq. 15 (Algorithm 1 says "less than").
        - Running statistics of normalisation layers are fused with their unit but have no penalty.
    """

    lockstep = True

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        lam: NonNegative = 1.0,
        mu: float = 0.001,
        alpha: Positive,
        r: Threshold,
        unit: UnitKind,
    ):
        super().__init__(net, training)
        strength = lam / alpha
        self.coefficient = training.penalty("method.lam/method.alpha", strength)
        self.mu = training.penalty("method.mu", mu)
        layout = self.layout(unit)
        threshold = resolve_threshold(r, layout)
        self.mixture = Anchor([name for u in layout[:threshold] for name in u.parameters])
        self.mean = Anchor([name for u in layout[threshold:] for name in u.parameters])

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy with the personalised (eq. 11) and the generic (eq. 13) penalty."""
        terms = super().objective(batch)
        if self.mixture.names:
            terms["personal"] = proximal(self.mixture.pairs(self), self.coefficient)
        if self.mean.names:
            terms["generic"] = proximal(self.mean.pairs(self), self.mu)
        return terms
