"""FedAS: the received body is aligned with the client's own features, and weighted by its Fisher trace."""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.loop import train_phase
from lightning_modules.nets.net import Net, evaluating
from lightning_modules.phases import Phase
from lightning_modules.prototypes import class_means
from lightning_modules.training import Training
from pflsim.config.settings import CountOrZero
from pflsim.config.validate import Positive
from pflsim.data.federated import Shard
from pflsim.messages import Message, Uplink
from pflsim.params import BODY
from pflsim.servers.fedas import FISHER_TRACE


class FedAS(ClientModule):
    """Aligns the received body with the client's own features, then trains body and head (Yang et al., CVPR 2024).

    With C_j, the mean feature of class j by the client's own last body, the alignment minimises
    Σ_j 1/B_j · Σ_{b: y_b=j} 1/D · ‖z_b − C_j‖² over the body, where B_j examples of a mini-batch have class j. Local
    training is plain SGD. The body is shared, the head private. The client also sends its Fisher trace. Reported model:
    personal, after local training.

    Args:
        net: body and head.
        training: the run's local training settings.
        align_epochs: epochs of alignment per round; with 0 the client is FedPer's.
        align_lr: learning rate of the alignment, constant over the rounds; the authors: 0.01.

    Notes:
        - A client that has not trained yet has no features of its own and aligns nothing.
        - The trace is Σ ‖∇F‖² over the mini-batches of one pass over the training examples, as in the authors' program,
          with the gradients of body and head in evaluation mode. Each mini-batch takes every k-th example.
    """

    lockstep = True
    needs_classes = True
    shared = BODY
    started: Tensor

    def __init__(self, net: Net, training: Training, *, align_epochs: CountOrZero = 1, align_lr: Positive = 0.01):
        super().__init__(net, training)
        self.align_epochs, self.align_lr = align_epochs, align_lr
        self.received, self.targets = Anchor(), Anchor()
        self.register_buffer("started", torch.zeros((), dtype=torch.bool))

    def receive(self, downlink: Message) -> None:
        """Store the body for `before_training`, which always follows."""
        self.received.store(downlink.weights)

    def before_training(self, shard: Shard) -> None:
        """Load the received body and align it with the features of the client's own."""
        received, aligns = self.received.tensors, self.align_epochs and bool(self.started)
        if aligns:
            with evaluating(self.net.body):
                means = class_means(self.net.body, shard.train, shard.num_classes).means
            self.targets.store({"means": means.to(self.device)})
        self.load_model(received, shard)
        if aligns:
            phase = Phase("align", "alignment", BODY, epochs=self.align_epochs, lr=self.align_lr, plain=True)
            train_phase(self, phase, shard.train)
        self.clear_anchors()
        self.started.fill_(True)

    def alignment(self, batch: Batch) -> Terms:
        """Return the distance of the features to the client's own class means, as a sum over the classes."""
        inputs, labels = batch
        features, means = self.net.body(inputs).flatten(1), self.targets.tensors["means"]
        sizes = one_hot(labels, len(means)).sum(0)[labels]
        return {"align": ((features - means[labels]).square().mean(1) / sizes).sum()}

    def reply(self, shard: Shard) -> Uplink:
        """Return the trained body and the Fisher trace."""
        return replace(super().reply(shard), numbers={FISHER_TRACE: self.fisher_trace(shard)})

    def fisher_trace(self, shard: Shard) -> float:
        """Return Σ ‖∇F‖² over the mini-batches."""
        count, total = math.ceil(shard.num_examples / self.training_settings.batch_size), 0.0
        for first in range(count):
            inputs, labels = shard.train.batch(torch.arange(first, shard.num_examples, count))
            with self.autocast():
                loss = self.task_loss(self.net(inputs), labels)
            gradients = torch.autograd.grad(loss, list(self.net.parameters()), allow_unused=True)
            total += float(torch.stack([g.double().square().sum() for g in gradients if g is not None]).sum())
        return total
