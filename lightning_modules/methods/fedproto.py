"""FedProto: clients share class means and align their features with the global ones."""

from typing import Literal

import torch
from torch import Tensor

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import alignment
from lightning_modules.nets.net import Net
from lightning_modules.prototypes import nearest_scores, received_means, reply_means
from lightning_modules.training import Training
from pflsim.config.validate import NonNegative
from pflsim.data.federated import Shard
from pflsim.messages import Message, Uplink
from pflsim.params import NOTHING


class FedProto(ClientModule):
    """Minimises CE + λ/D·‖z − C̄_y‖² over the whole net and predicts by the nearest C̄_j (Tan et al. 2022, eqs. 4, 7, 8).

    The client sends class means of z = f(φ; x) (eq. 3) and receives the global means C̄ (eq. 6). No weights are shared.
    Reported model: the trained net with the newest global means, which the next round would send.

    Args:
        net: body and head.
        training: the run's local training settings.
        lam: λ ≥ 0; with 0 the net trains as Local's. The paper: 1 (MNIST, FEMNIST) or 0.1 (CIFAR-10).
        predict: predict by the nearest global mean ("prototype", as in the paper) or by the net's head ("head").

    Notes:
        - Eq. 8 sums the distances of class means. Here each example's feature is compared with the global mean of its
          class, as in the paper's analysis (appendix B), and averaged over batch and width. Examples of a class without
          a global mean add 0.
        - A class without a global mean is never predicted. Without any global mean all classes score the same.
        - Class means are computed over the training shard after training, not during training.
    """

    lockstep = True
    needs_classes = True
    shared = NOTHING
    reported_phase = "received"
    compares_features = True
    means: Tensor
    held: Tensor

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        lam: NonNegative = 1.0,
        predict: Literal["prototype", "head"] = "prototype",
    ):
        super().__init__(net, training)
        self.lam, self.predicts_by = lam, predict
        self.register_buffer("means", torch.zeros(net.num_classes, net.feature_width))
        self.register_buffer("held", torch.zeros(net.num_classes, dtype=torch.bool))

    def receive(self, downlink: Message) -> None:
        """Store the global means, for training and for prediction."""
        super().receive(downlink)
        found = received_means(downlink, "FedProto")
        self.held.copy_(found.counts > 0)
        self.means.copy_(found.means)

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy of the head and the alignment with the global means."""
        inputs, labels = batch
        features = self.net.body(inputs)
        align = alignment(features.flatten(1), labels, self.means, self.held)
        return {self.loss_name: self.task_loss(self.net.head(features), labels), "align": self.lam * align}

    def predict(self, inputs: Tensor) -> Tensor:
        """Return −‖z − C̄_j‖ (eq. 4) or the head's logits, [B, C]."""
        if self.predicts_by == "head":
            return self.net(inputs)
        return nearest_scores(self.net.body(inputs).flatten(1), self.means, self.held)

    def reply(self, shard: Shard) -> Uplink:
        """Return the class means of the trained body (eq. 3)."""
        return reply_means(self.net.body, shard)
