"""FedPAC: features aligned with global class means, and a head mixed from all clients' heads."""

from dataclasses import replace

import torch

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.nets.net import Net, evaluating
from lightning_modules.phases import Phase, Schedule
from lightning_modules.prototypes import all_features, class_means, class_sums
from lightning_modules.training import Training
from pflsim.config.settings import Count
from pflsim.config.validate import NonNegative, Positive
from pflsim.data.federated import Shard
from pflsim.messages import Message, Uplink
from pflsim.params import BODY, HEAD, snapshot
from pflsim.servers.fedpac import VARIANCE, WEIGHTED_MEANS


class FedPAC(ClientModule):
    """Trains the head on the received body, then the body by CE + λ/D·‖z − t_y‖² (Xu et al. 2023, Algorithm 1).

    t_k is the received global mean of the features of class k, or else the client's own under the received body. There
    is no such term before global means exist. The client sends both parts, its class means under the trained body, and
    two statistics of its features under the received body, from which the server computes how to mix the heads:
    V = (1/n)·(mean ‖z‖² − ‖H‖²) and H_k = n_k/n · mean of class k. Reported model: the mean body and the mixed head.

    Args:
        net: body and head.
        training: the run's local training settings.
        lam: λ ≥ 0; the authors: 1.
        head_epochs: local epochs of the head.
        head_lr: learning rate of the head in round 1; None: the run's. The authors: 0.1.

    Notes:
        The body is in evaluation mode while the head trains and for all statistics.
    """

    lockstep = True
    needs_classes = True
    reported_phase = "received"

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        lam: NonNegative = 1.0,
        head_epochs: Count = 1,
        head_lr: Positive | None = 0.1,
    ):
        super().__init__(net, training)
        self.lam, self.head_epochs, self.head_lr = lam, head_epochs, head_lr
        self.targets, self.statistics = Anchor(), Anchor()

    def schedule(self) -> Schedule:
        """Return the phases `head` and `body`."""
        head = Phase("head", objective="head_objective", trainable=HEAD, epochs=self.head_epochs, lr=self.head_lr)
        return (head, Phase("body", trainable=BODY))

    def receive(self, downlink: Message) -> None:
        """Load body and head, and store the global class means."""
        super().receive(downlink)
        found = downlink.prototypes
        self.targets.store({} if found is None else {"means": found.means, "held": found.counts > 0})

    def before_training(self, shard: Shard) -> None:
        """Compute V, H and the client's own class means under the received body."""
        self.recalibrate(shard.train)
        with evaluating(self.net.body):
            features = all_features(self.net.body, shard.train)
        y, n, received = shard.train.y, shard.num_examples, self.targets.tensors
        sums = class_sums(features.double(), y, shard.num_classes)
        # clamp: rounding can make 0 negative
        variance = (features.double().square().sum(1).mean() - (sums / n).square().sum()).clamp(min=0) / n
        self.statistics.store({VARIANCE: variance, WEIGHTED_MEANS: (sums / n).to(features.dtype)})
        if received:
            own = sums / torch.bincount(y, minlength=shard.num_classes).clamp(min=1)[:, None]
            means = torch.where(received["held"][:, None], received["means"], own.to(features.dtype))
            self.targets.store({"means": means})

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy and the alignment of the features."""
        inputs, labels = batch
        features, targets = self.net.body(inputs), self.targets.tensors
        terms = {self.loss_name: self.task_loss(self.net.head(features), labels)}
        if targets and self.lam:
            terms["align"] = self.lam * (features.flatten(1) - targets["means"][labels]).square().mean()
        return terms

    def reply(self, shard: Shard) -> Uplink:
        """Return body and head, the class means of the trained body, V and H."""
        found = self.statistics.tensors
        return replace(
            super().reply(shard),
            prototypes=class_means(self.net.body, shard.train, shard.num_classes),
            extra=snapshot({WEIGHTED_MEANS: found[WEIGHTED_MEANS]}),
            numbers={VARIANCE: float(found[VARIANCE])},
        )
