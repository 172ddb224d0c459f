"""FedFCD: feature alignment, decision fusion, hierarchical optimisation."""

from copy import deepcopy
from typing import Literal

import torch
from torch import Tensor

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import alignment
from lightning_modules.nets.net import Net
from lightning_modules.phases import Alternate, Phase, Schedule
from lightning_modules.prototypes import reply_means
from lightning_modules.training import Training
from pflsim.config.validate import NonNegative
from pflsim.data.federated import Shard
from pflsim.messages import Message, Uplink
from pflsim.params import BODY, HEAD, Selector


class FedFCD(ClientModule):
    """Trains a private body θ and head φ_i with a received global head φ_g (Li et al. 2024, eqs. 3-10, Algorithm 1).

    The decision is softmax(φ_g(z) + φ_i(z)) with z = f(θ; x) (eqs. 7, 8), in training and in `predict`. Local training
    alternates θ ← θ − η·∇[CE + λ/D·‖z − C̄_y‖²] (eq. 9) and φ_i ← φ_i − η·∇CE at the new θ (eq. 10). The client sends
    class means of z and receives φ_g and the global means C̄. Reported model: personal, after local training.

    Args:
        net: body and head.
        training: the run's local training settings.
        lam: λ ≥ 0 of eq. 6; the paper: 1 (Fashion-MNIST) or 5 (CIFAR).
        alternate: alternate the two steps by batch or by epoch.
        feature_alignment: use the term of eq. 6.
        decision_fusion: use φ_g in eq. 8; otherwise φ_i alone decides.
        hierarchical: alternate eqs. 9 and 10; otherwise train θ and φ_i in one step. With all three off the method is
            Local.

    Notes:
        - Examples of a class without a global mean add 0 to the alignment.
        - φ_g starts as a copy of the initial φ_i. Only the server trains it.
        - The step on φ_i computes the features again with the body in training mode, so running statistics of BatchNorm
          are updated twice per batch.
        - Class means are computed once, after all local epochs. Algorithm 1 computes them in each epoch but sends only
          the last ones.
    """

    lockstep = True
    needs_classes = True
    shared = Selector(("global_head",))
    compares_features = True

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        lam: NonNegative = 1.0,
        alternate: Literal["batch", "epoch"] = "batch",
        feature_alignment: bool = True,
        decision_fusion: bool = True,
        hierarchical: bool = True,
    ):
        super().__init__(net, training)
        self.lam, self.feature_alignment = lam, feature_alignment
        self.alternate: Literal["batch", "epoch"] = alternate
        self.hierarchical = hierarchical
        self.global_head = deepcopy(net.head).requires_grad_(False) if decision_fusion else None
        self.global_means = Anchor()

    def schedule(self) -> Schedule:
        """Return the phases `body` and `head` in alternation, or one phase for both."""
        if not self.hierarchical:
            return (Phase(),)
        body, head = Phase("body", "objective", BODY), Phase("head", "decision_objective", HEAD)
        return (Alternate((body, head), every=self.alternate),)

    def receive(self, downlink: Message) -> None:
        """Load φ_g and store the global means for the round."""
        super().receive(downlink)
        found = downlink.prototypes
        self.global_means.store({} if found is None else {"means": found.means, "held": found.counts > 0})

    def decide(self, features: Tensor) -> Tensor:
        """Return the logits φ_g(z) + φ_i(z), [B, C] (eqs. 7, 8); the loss applies the softmax."""
        local = self.net.head(features)
        return local if self.global_head is None else self.global_head(features) + local

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy of the fused decision and the alignment of features (eq. 9)."""
        inputs, labels = batch
        features = self.net.body(inputs)
        terms = {self.loss_name: self.task_loss(self.decide(features), labels)}
        if self.feature_alignment:
            terms["align"] = self._alignment(features.flatten(1), labels)
        return terms

    def decision_objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy of the fused decision on fixed features (eq. 10)."""
        inputs, labels = batch
        with torch.no_grad():
            features = self.net.body(inputs)
        return {self.loss_name: self.task_loss(self.decide(features), labels)}

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the logits of the fused decision."""
        return self.decide(self.net.body(inputs))

    def reply(self, shard: Shard) -> Uplink:
        """Return the class means of the training examples (eq. 3), or nothing if the server does not use them."""
        if self.feature_alignment or self.global_head is not None:
            return reply_means(self.net.body, shard)
        return Uplink(client=shard.client, num_examples=shard.num_examples)

    def _alignment(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return λ/B · Σ 1/D · ‖z − C̄_y‖² (eq. 6)."""
        stored = self.global_means.tensors
        return self.lam * alignment(features, labels, **stored) if stored and self.lam else features.new_zeros(())
