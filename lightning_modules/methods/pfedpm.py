"""pFedPM: clients align class means with a mixture of own and global ones, and train a relation module."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.nets.net import Net, evaluating
from lightning_modules.nets.relation import RelationModule
from lightning_modules.phases import Alternate, Phase, Schedule
from lightning_modules.prototypes import class_means, received_means
from lightning_modules.training import Training
from pflsim.config.settings import Probability
from pflsim.config.validate import NonNegative, Width
from pflsim.data.federated import Shard
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.params import NOTHING, Selector

Distance = Literal["mse", "l2"]


class PFedPM(ClientModule):
    """Trains the net, then a relation module, with fused class means (Xing et al., eqs. 4 to 13, Algorithm 1).

    The net minimises CE + λ·R (eq. 9). R is the distance between a batch's class means and C̃_j = a·C_j + (1−a)·C̄_j
    (eq. 8), where C_j is the client's class mean after its last round and C̄_j the server's. The relation module, with
    the net fixed, minimises the squared error of its scores R_sj against 1[y_s = j] over all classes (eqs. 12, 13). C̃
    is fixed during a round. Only class means are shared, so models may differ if their features have one shape.
    Reported model: personal, after local training.

    Args:
        net: body and head; the head is the decision module.
        training: the run's local training settings.
        a: weight of the client's own features in C̃, in [0, 1].
        lam: λ ≥ 0.
        distance: R of a class: "l2", the norm of the difference (eq. 11), or "mse", its mean square, as in FedProto.
        predict: predict by the head ("decision", pFedPM) or by the relation module ("relation", R-pFedPM).
        alternate: train the relation module after the net ("round", Figure 1), or on each mini-batch after the net's
            step ("batch", as printed in Algorithm 1); the net is the same.
        relation_hidden: width of the relation module's fully connected layers.

    Notes:
        - If one of the two means of a class is missing, C̃_j is the other one. A class that no client has reported has
          no C̃_j: it adds no loss term and scores 0. In round 1 the net therefore trains by CE only, and the relation
          module is not trained. R-pFedPM predicts by the head until C̃ exists.
        - With a=1, a class without an own mean adds no term to R, but the relation module uses C̄_j.
        - Own means are computed over the training shard after training. The body is then in evaluation mode, as it is
          while the relation module trains, so its running statistics do not change.
        - Eq. 12 is summed over the classes and averaged over the batch.
    """

    lockstep = True
    needs_classes = True
    shared = NOTHING
    compares_features = True
    own_means: Tensor
    own_counts: Tensor
    mixed: Tensor
    seen: Tensor

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        a: Probability = 0.5,
        lam: NonNegative = 0.1,
        distance: Distance = "l2",
        predict: Literal["decision", "relation"] = "decision",
        alternate: Literal["round", "batch"] = "round",
        relation_hidden: Width = 50,
    ):
        super().__init__(net, training)
        self.a, self.lam = a, lam
        self.distance: Distance = distance
        self.predicts_by, self.alternate = predict, alternate
        self.relation = RelationModule(net.feature_shape, hidden=relation_hidden)
        classes, width = net.num_classes, net.feature_width
        self.register_buffer("own_means", torch.zeros(classes, width))
        self.register_buffer("own_counts", torch.zeros(classes, dtype=torch.int64))
        self.register_buffer("mixed", torch.zeros(classes, width))
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.bool))

    def schedule(self) -> Schedule:
        """Return the phases `net` and `relation`."""
        net = Phase("net")
        relation = Phase("relation", "relation_loss", Selector(("relation",)), lockstep=False)
        if not self.seen.any():  # not even weight decay may change the module
            return net, replace(relation, epochs=0)
        return (Alternate((net, relation), every="batch"),) if self.alternate == "batch" else (net, relation)

    def receive(self, downlink: Message) -> None:
        """Store the mixture of own and global class means (eq. 8), for training and prediction."""
        super().receive(downlink)
        shared, own = received_means(downlink, "pFedPM"), Prototypes(self.own_means, self.own_counts)
        mixed, seen = mixed_features(own, shared, self.a)
        self.mixed.copy_(mixed)
        self.seen.copy_(seen)

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy and the alignment of the batch's class means with C̃ (eq. 9)."""
        inputs, labels = batch
        features = self.net.body(inputs)
        loss = self.task_loss(self.net.head(features), labels)
        if self.lam == 0:  # 0·NaN is NaN: a diverged client must not affect others
            return {self.loss_name: loss}
        means, counts = batch_means(features.flatten(1), labels, self.net.num_classes)
        aligned = (counts > 0) & self.seen
        if self.a == 1:
            aligned = aligned & (self.own_counts > 0)
        return {self.loss_name: loss, "align": self.lam * feature_distance(means, self.mixed, aligned, self.distance)}

    def relation_loss(self, batch: Batch) -> Terms:
        """Return the squared error of the scores against 1[y = j] over all classes with a C̃_j (eq. 12)."""
        inputs, labels = batch
        with torch.no_grad(), evaluating(self.net.body):
            features = self.net.body(inputs)
        scores = self._scores(features)
        errors = (scores - one_hot(labels, self.net.num_classes).to(scores.dtype)).square()
        return {"mse": errors[:, self.seen].sum() / len(labels)}

    def predict(self, inputs: Tensor) -> Tensor:
        """Return logits of the head or scores of the relation module, [B, C].

        The head predicts until C̃ exists.
        """
        if self.predicts_by == "relation" and torch.compiler.is_exporting():  # a program has no branches on values
            features, known = self.net.body(inputs), self.mixed.view(-1, *self.net.feature_shape)
            scores = torch.where(self.seen, self.relation(features, known), 0.0)
            return torch.where(self.seen.any(), scores, self.net.head(features))
        if self.predicts_by == "decision" or not self.seen.any():
            return self.net(inputs)
        return self._scores(self.net.body(inputs))

    def reply(self, shard: Shard) -> Uplink:
        """Return the class means of the trained body (eq. 6) and store them as the own means of the next round."""
        own = class_means(self.net.body, shard.train, shard.num_classes)
        self.own_means.copy_(own.means)
        self.own_counts.copy_(own.counts)
        return Uplink(prototypes=own, client=shard.client, num_examples=shard.num_examples)

    def _scores(self, features: Tensor) -> Tensor:
        """Return R_sj of all examples and classes, [B, C] (eq. 13); 0 for a class without C̃."""
        known = self.mixed[self.seen].view(-1, *self.net.feature_shape)
        single = len(features) * len(known) == 1  # batch normalisation needs two pairs
        with evaluating(self.relation.norm) if single else nullcontext():
            found = self.relation(features, known)
        scores = found.new_zeros(len(features), len(self.seen))
        scores[:, self.seen] = found
        return scores


def mixed_features(own: Prototypes, shared: Prototypes, a: float) -> tuple[Tensor, Tensor]:
    """Return C̃_j = a·C_j + (1−a)·C̄_j (pFedPM eq. 8); where one mean is missing, the other one.

    Args:
        own: the client's class means C, [C, D], with counts [C].
        shared: the server's class means C̄.
        a: weight of the own means.

    Returns:
        C̃ [C, D], and a mask [C] of the classes that have one (the other rows are 0).
    """
    in_own, in_shared = (own.counts > 0)[:, None], (shared.counts > 0)[:, None]
    both = a * own.means + (1 - a) * shared.means if a < 1 else own.means  # 0·NaN is NaN
    one = torch.where(in_own, own.means, torch.where(in_shared, shared.means, torch.zeros_like(shared.means)))
    return torch.where(in_own & in_shared, both, one), (in_own | in_shared)[:, 0]


def batch_means(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Compute the differentiable mean feature of each class in a batch.

    Args:
        features: [B, D].
        labels: [B].
        num_classes: C.

    Returns:
        Means [C, D], 0 for a class without examples, and counts [C].
    """
    members = one_hot(labels, num_classes).to(features.dtype)
    counts = members.sum(0)
    return members.T @ features / counts.clamp(min=1)[:, None], counts


def feature_distance(means: Tensor, mixed: Tensor, aligned: Tensor, distance: Distance) -> Tensor:
    """Return R, the distance between class means and C̃, averaged over the chosen classes (pFedPM eq. 11).

    Args:
        means: class means [C, D] of a batch; they get a gradient.
        mixed: C̃ [C, D].
        aligned: mask [C] of the classes to average over; without any, the distance is 0.
        distance: "mse" or "l2".
    """
    difference = torch.where(aligned[:, None], means - mixed, 0)
    each = difference.square().mean(1) if distance == "mse" else torch.linalg.vector_norm(difference, dim=1)
    return (each * aligned).sum() / aligned.sum().clamp(min=1)


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Return the mask 1[y_s = j], [B, C]."""
    return labels[:, None] == torch.arange(num_classes, device=labels.device)
