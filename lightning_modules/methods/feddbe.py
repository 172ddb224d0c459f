"""FedDBE: a personal vector holds the domain's bias, and the mean of the features stays near the global one."""

import torch
from torch import Tensor, nn

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.loop import train_phase
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.prototypes import all_features
from lightning_modules.training import Training
from pflsim.config.validate import NonNegative, Portion
from pflsim.data.federated import Shard
from pflsim.messages import Message, Uplink
from pflsim.params import Selector, snapshot
from pflsim.servers.feddbe import MEAN


class FedDBE(ClientModule):
    """Minimises CE(head(z + v), y) + κ/(2D)·‖m − m_g‖² over the net and the private vector v (Zhang et al. 2023).

    m ← (1 − μ)·m + μ·mean(z) is the running mean of the features z = body(x) over the mini-batches of a round, from 0.
    m_g is the global mean of features, which the server computes once, in the initial round. The net is shared, v is
    private. Reported model: personal, head(body(x) + v) with the received net, as in the authors' program. The global
    model has no v.

    Args:
        net: body and head.
        training: the run's local training settings, for v too.
        kappa: κ ≥ 0; the authors: 50 for a CNN on Fashion-MNIST.
        mean_momentum: μ in (0, 1]; with 1, m is the mean of the mini-batch. The authors: 1.
        personal_vector: whether v is trained; else it stays 0. Without it and with κ = 0 the method is FedAvg.

    Notes:
        - The gradient of m goes through the current mini-batch only.
        - In the initial round each client trains a copy of the net as in a round of FedAvg, as in the authors' program,
          and sends the mean feature of its training examples. The copy is discarded.
    """

    lockstep = True
    reported_phase = "received"

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        kappa: NonNegative = 50.0,
        mean_momentum: Portion = 1.0,
        personal_vector: bool = True,
    ):
        super().__init__(net, training)
        self.kappa, self.mean_momentum = kappa, mean_momentum
        self.trained = Selector(("net", "vector") if personal_vector else ("net",))
        self.vector = nn.Parameter(torch.zeros(net.feature_shape))
        self.means = Anchor()

    def schedule(self) -> Schedule:
        """Return one phase that trains the net and v."""
        return (Phase(trainable=self.trained),)

    def receive(self, downlink: Message) -> None:
        """Load the net and store the global mean; the running mean starts at 0."""
        super().receive(downlink)
        if MEAN in downlink.extra and self.kappa:
            target = downlink.extra[MEAN]
            self.means.store({"target": target, "running": torch.zeros_like(target)})

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy with v and the distance of the means."""
        inputs, labels = batch
        features, stored = self.net.body(inputs), self.means.tensors
        terms = {self.loss_name: self.task_loss(self.net.head(features + self.vector), labels)}
        if stored:
            of_batch = features.flatten(1).to(stored["running"].dtype).mean(0)
            mean = torch.lerp(stored["running"], of_batch, self.mean_momentum)
            terms["mean"] = self.kappa / 2 * (mean - stored["target"]).square().mean()
            stored["running"].copy_(mean.detach())
        return terms

    def survey(self, shard: Shard) -> Uplink:
        """Return the mean feature of the training examples after a training of the net."""
        train_phase(self, Phase(), shard.train)
        features = all_features(self.net.body, shard.train)
        mean = features.double().mean(0).to(features.dtype)
        return Uplink(extra=snapshot({MEAN: mean}), client=shard.client, num_examples=shard.num_examples)

    def predict(self, inputs: Tensor) -> Tensor:
        """Return scores of the personal model, with v."""
        return self.net.head(self.net.body(inputs) + self.vector)

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Return scores of the global model, without v."""
        return self.net(inputs)
