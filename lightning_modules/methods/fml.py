"""FML: a private net and a common one learn from each other on every batch."""

from lightning_modules.base import Batch, Terms
from lightning_modules.common_net import CommonNet
from lightning_modules.losses import kl
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.settings import Probability
from pflsim.params import Selector


class FML(CommonNet):
    """Minimises α·CE(f) + (1 − α)·KL(p_g‖p_f) over f and β·CE(g) + (1 − β)·KL(p_f‖p_g) over g (Shen et al. 2020).

    p_f and p_g are the softmax outputs of the client's own net f and of the common net g (the paper's meme); as a
    target, each is constant. g alone is shared. Reported model: f, after local training; the global model is g.

    Args:
        net: f.
        training: the run's local training settings.
        common: g, see `CommonNet`.
        alpha: α in [0, 1]; with 1, f trains as Local's.
        beta: β in [0, 1]; with 1, g trains as FedAvg's.

    Notes:
        - One step minimises both, so that both targets are those before it.
        - A term of weight 0 is left out.
    """

    lockstep = True

    def __init__(self, net: Net, training: Training, *, common: Net, alpha: Probability = 0.5, beta: Probability = 0.5):
        super().__init__(net, training, common=common)
        self.alpha, self.beta = alpha, beta

    def schedule(self) -> Schedule:
        """Return one phase that trains both nets."""
        return (Phase(trainable=Selector(("net", "common"))),)

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy of both nets, and the divergence of each from the other."""
        inputs, labels = batch
        own, common = self.net(inputs), self.common(inputs)
        terms: Terms = {}
        for prefix, weight, scores, other in (("", self.alpha, own, common), ("common_", self.beta, common, own)):
            if weight > 0:
                terms[f"{prefix}{self.loss_name}"] = weight * self.task_loss(scores, labels)
            if weight < 1:
                terms[f"{prefix}kl"] = (1 - weight) * kl(other.detach(), scores)
        return terms
