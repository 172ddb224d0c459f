"""FD: clients share the mean outputs of each label, and learn from those of the others."""

from typing import Literal

import torch
from torch import Tensor

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import soft_cross_entropy
from lightning_modules.nets.net import Net
from lightning_modules.prototypes import class_means, received_means
from lightning_modules.training import Training
from pflsim.config.validate import NonNegative
from pflsim.data.federated import Shard
from pflsim.messages import Message, Uplink
from pflsim.params import NOTHING


class FD(ClientModule):
    """Minimises CE + λ/B·Σ_b −Σ_c t_{y_b,c} log softmax_c f(x_b) over the whole net f (Jeong et al. 2018).

    The client sends the mean outputs of f for each of its labels, after training. t_y is the mean of those that the
    other clients have sent for the label y. No weights are shared. Reported model: f, after local training.

    Args:
        net: f, of any architecture.
        training: the run's local training settings.
        lam: λ ≥ 0; with 0, the client trains as Local's.
        average: what is averaged: "logits", of which t is the softmax, or "probabilities", the softmax outputs.

    Notes:
        - An example whose label has no t adds 0 to the second term and counts in B.
        - The means are those of one pass over the training examples after training, not of the outputs during training.
    """

    lockstep = True
    needs_classes = True
    shared = NOTHING
    targets: Tensor
    held: Tensor

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        lam: NonNegative = 1.0,
        average: Literal["logits", "probabilities"] = "logits",
    ):
        super().__init__(net, training)
        self.lam, self.average = lam, average
        self.register_buffer("targets", torch.zeros(net.num_classes, net.num_classes))
        self.register_buffer("held", torch.zeros(net.num_classes, dtype=torch.bool))

    def receive(self, downlink: Message) -> None:
        """Store t [C, C], and which labels have one."""
        super().receive(downlink)
        found = received_means(downlink, "FD")
        self.held.copy_(found.counts > 0)
        self.targets.copy_(found.means.softmax(1) if self.average == "logits" else found.means)

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy of the labels, and that of the other clients' mean outputs."""
        inputs, labels = batch
        scores = self.net(inputs)
        terms = {self.loss_name: self.task_loss(scores, labels)}
        if self.lam:
            each = soft_cross_entropy(self.targets[labels], scores)
            terms["distillation"] = self.lam * (each * self.held[labels]).mean()
        return terms

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return the outputs that are averaged, [B, C]."""
        scores = self.net(inputs)
        return scores if self.average == "logits" else scores.softmax(1)

    def reply(self, shard: Shard) -> Uplink:
        """Return the mean outputs of each label over the training examples."""
        means = class_means(self.outputs, shard.train, shard.num_classes)
        return Uplink(prototypes=means, client=shard.client, num_examples=shard.num_examples)
