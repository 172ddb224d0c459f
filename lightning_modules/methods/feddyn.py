"""FedDyn: a dynamic regulariser aligns the clients' optima with the global one."""

from lightning_modules.anchor import Anchor, Memory
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import inner_product, proximal
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.config.validate import Positive
from pflsim.data.federated import Shard
from pflsim.messages import Uplink


class FedDyn(ClientModule):
    """Minimises F(θ) − ⟨h_i, θ⟩ + α/2·‖θ − θ^t‖² from the received θ^t (Acar et al. 2021, Algorithm 1).

    Afterwards h_i ← h_i − α·(θ − θ^t): at the minimum, h_i is the client's gradient ∇F(θ). Reported model: global.

    Args:
        net: body and head.
        training: the run's local training settings.
        alpha: α > 0, with lr·α ≤ 2; a larger value keeps θ nearer to θ^t. The same as the server's.

    Notes:
        The terms and h_i cover the parameters, not the running statistics of normalisation layers.
    """

    lockstep = True
    reported_model = "global"

    def __init__(self, net: Net, training: Training, *, alpha: Positive = 0.01):
        super().__init__(net, training)
        self.alpha = training.penalty("method.alpha", alpha)
        self.gradient = Memory(self, self.shared_parameters())
        self.received = Anchor(self.shared_parameters())

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy, −⟨h_i, θ⟩, and the penalty towards θ^t."""
        linear, prox = inner_product(self.gradient.pairs(self)), proximal(self.received.pairs(self), self.alpha)
        return {**super().objective(batch), "linear": -linear, "prox": prox}

    def reply(self, shard: Shard) -> Uplink:
        """Update h_i, and return θ."""
        own, received = self.gradient.tensors, self.received.tensors
        moved = {name: self.get_parameter(name).detach() - value for name, value in received.items()}
        self.gradient.update({name: own[name] - self.alpha * step for name, step in moved.items()})
        return super().reply(shard)
