"""MOON: features near those of the received model, far from those of the client's previous one."""

from copy import deepcopy

import torch
from torch import Tensor
from torch.func import functional_call

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import cross_entropy
from lightning_modules.nets.net import Net, evaluating
from lightning_modules.training import Training
from pflsim.config.validate import NonNegative, Positive
from pflsim.data.federated import Shard
from pflsim.messages import Message, Uplink
from pflsim.params import load


class Moon(ClientModule):
    """Minimises CE − μ·log(e^{p/τ} / (e^{p/τ} + e^{q/τ})), the model-contrastive loss (Li et al. 2021, eq. 3).

    p = cos(z, z_glob) and q = cos(z, z_prev) compare an example's features under the trained body with those under the
    received body, and under the client's own body after its previous round. Reported model: global.

    Args:
        net: body and head.
        training: the run's local training settings.
        mu: μ ≥ 0; 0 is FedAvg.
        temperature: τ > 0.

    Notes:
        - Features are those that the head receives. The paper inserts a projection head before the classifier.
        - The contrast is 0 in a client's first round, since it has no previous body.
        - z_glob and z_prev are computed in evaluation mode, z_glob with the received running statistics if they travel.
    """

    lockstep = True
    reported_model = "global"
    has_previous: Tensor

    def __init__(self, net: Net, training: Training, *, mu: NonNegative = 1.0, temperature: Positive = 0.5):
        super().__init__(net, training)
        self.mu, self.temperature = mu, temperature
        self.received, self.previous = Anchor(), deepcopy(net.body).requires_grad_(False)
        self.register_buffer("has_previous", torch.tensor(False))

    def receive(self, downlink: Message) -> None:
        """Load the global model, and keep its body."""
        super().receive(downlink)
        self.received.store({k: value for k, value in downlink.weights.items() if k.startswith("net.body.")})

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy and the contrast of features."""
        inputs, labels = batch
        features = self.net.body(inputs)
        received = {name.removeprefix("net.body."): value for name, value in self.received.tensors.items()}
        with torch.no_grad(), evaluating(self.net.body), evaluating(self.previous):
            others = functional_call(self.net.body, received, (inputs,)), self.previous(inputs)
        near = [torch.cosine_similarity(features.flatten(1), other.flatten(1)) for other in others]
        contrast = cross_entropy(
            torch.stack(near, 1) / self.temperature, labels.new_zeros(len(labels), dtype=torch.int64)
        )
        loss = self.task_loss(self.net.head(features), labels)
        return {self.loss_name: loss, "con": self.mu * self.has_previous * contrast}

    def reply(self, shard: Shard) -> Uplink:
        """Keep the trained body for the client's next round."""
        load(self.previous, self.net.body.state_dict())
        self.has_previous.fill_(True)
        return super().reply(shard)
