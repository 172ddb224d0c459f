"""FedProto: clients share class means and pull their features towards everyone's."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import alignment, cross_entropy
from lightning_modules.nets.net import Net
from lightning_modules.prototypes import nearest_scores, received_means, reply_means
from lightning_modules.training import Training
from pflsim.config.validate import non_negative
from pflsim.data.federated import Shard
from pflsim.messages import Message, Uplink
from pflsim.params import NOTHING


class FedProto(ClientModule):
    """CE + λ/D·‖z − C̄_y‖² on the whole net (Tan et al. 2022, eqs. 7, 8); prediction by the nearest C̄_j (eq. 4).

    Class means of z = f(φ; x) go up (eq. 3), the global means C̄ come down (eq. 6); no weight ever leaves. Judged by
    the trained net with the newest global means, which are what the next round would send.

    Args:
        net: body and head.
        training: the run's local training settings.
        lam: λ ≥ 0; 0 trains like Local. The paper: 1 (MNIST, FEMNIST) or 0.1 (CIFAR-10).
        predict: judged by the nearest global mean ("prototype", the paper) or by the net's own head ("head").

    Notes:
        - Eq. 8 sums the distances of class means; here each example's feature is compared with the mean of its class,
          as in the paper's analysis (appendix B), averaged over batch and width. Without C̄_y it adds nothing.
        - A class without a global mean is never the nearest. Without any, all classes score alike.
        - Class means are taken over the training shard after training, not over the moving model.
    """

    lockstep = True
    shared = NOTHING
    reported_phase = "received"
    compares_features = True
    means: Tensor
    held: Tensor

    def __init__(
        self, net: Net, training: Training, *, lam: float = 1.0, predict: Literal["prototype", "head"] = "prototype"
    ):
        super().__init__(net, training)
        self.lam, self.judged_module = non_negative("method.lam", lam), predict
        self.register_buffer("means", torch.zeros(net.num_classes, net.feature_width))
        self.register_buffer("held", torch.zeros(net.num_classes, dtype=torch.bool))

    def receive(self, downlink: Message) -> None:
        """Keep the global means, for training and for prediction."""
        super().receive(downlink)
        found = received_means(downlink, "FedProto")
        self.held.copy_(found.counts > 0)
        # the row of a missing class may hold anything
        self.means.copy_(torch.where(self.held[:, None], found.means, torch.zeros_like(found.means)))

    def objective(self, batch: Batch) -> Terms:
        """Cross-entropy of the head and the pull towards the global means."""
        inputs, labels = batch
        features = self.net.body(inputs)
        pull = alignment(features.flatten(1), labels, self.means, self.held)
        return {"ce": cross_entropy(self.net.head(features), labels), "align": self.lam * pull}

    def predict(self, inputs: Tensor) -> Tensor:
        """−‖z − C̄_j‖ (eq. 4), or the head's logits, [B, C]."""
        if self.judged_module == "head":
            return self.net(inputs)
        return nearest_scores(self.net.body(inputs).flatten(1), self.means, self.held)

    def plain_net(self, model: Literal["personal", "global"]) -> Net | None:
        """The net, where its own head decides."""
        return self.net if self.judged_module == "head" else None

    def reply(self, shard: Shard) -> Uplink:
        """The class means of the trained body (eq. 3)."""
        return reply_means(self.net.body, shard)
