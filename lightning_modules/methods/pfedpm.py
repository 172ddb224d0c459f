"""pFedPM: clients pull their class means towards a mixture of their own and everyone's, and learn a relation module."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import cross_entropy
from lightning_modules.modes import evaluating
from lightning_modules.nets.net import Net
from lightning_modules.nets.relation import RelationModule
from lightning_modules.phases import Alternate, Phase, Schedule
from lightning_modules.prototypes import class_means, received_means
from lightning_modules.training import Training
from pflsim.config.validate import non_negative
from pflsim.data.federated import Shard
from pflsim.errors import SettingsError
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.params import NOTHING, Selector

Distance = Literal["mse", "l2"]


class PFedPM(ClientModule):
    """Personalised federated learning by feature fusion (Xing et al., eqs. 4 to 13, Algorithm 1).

    First the net: CE + λ·R (eq. 9), R the distance between a batch's class means and C̃_j = a·C_j + (1−a)·C̄_j (eq. 8),
    C_j the client's own class mean after its last round and C̄_j the server's. Then, the net fixed, the relation
    module: the squared error of its scores R_sj against 1[y_s = j] over all classes (eqs. 12, 13). C̃ is fixed
    meanwhile. Only class means travel, so models may differ behind features of one shape.

    Args:
        net: body and head; the head is the decision module.
        training: the run's local training settings.
        a: weight of the client's own features in C̃, in [0, 1].
        lam: λ ≥ 0.
        distance: R of a class: "mse", the mean square of the difference, or "l2", its norm (eq. 11).
        predict: what the client is judged by: "decision" (pFedPM) or "relation" (R-pFedPM).
        alternate: train the relation module after the net ("round", Figure 1), or on every mini-batch after the net's
            step ("batch", as Algorithm 1 is printed); the net is the same.
        relation_hidden: width of the relation module's fully connected layers.

    Notes:
        - C̃_j where one of the two means is missing is the other one; a class nobody has reported has none, adds no
          term, and scores 0. So in round 1 the net trains by CE alone and the relation module not at all; until it has
          something to compare with, R-pFedPM decides by the head.
        - With a=1 a class whose own mean is missing has no term in R either, though the relation module sees C̄_j.
        - Own means are taken over the whole training shard after training, with the body in evaluation mode, in which
          it also is while the relation module trains: its running statistics do not move.
        - Eq. 12 is summed over the classes and averaged over the batch.
    """

    lockstep = True
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
        a: float = 0.5,
        lam: float = 1.0,
        distance: Distance = "mse",
        predict: Literal["decision", "relation"] = "decision",
        alternate: Literal["round", "batch"] = "round",
        relation_hidden: int = 50,
    ):
        super().__init__(net, training)
        if not 0 <= a <= 1:
            raise SettingsError(f"method.a={a} is not in [0, 1]: it is the weight of a client's own features")
        self.a, self.lam = a, non_negative("method.lam", lam)
        self.distance: Distance = distance
        self.judged_module, self.alternate = predict, alternate
        self.relation = RelationModule(net.feature_shape, hidden=relation_hidden)
        classes, width = net.num_classes, net.feature_width
        self.register_buffer("own_means", torch.zeros(classes, width))
        self.register_buffer("own_counts", torch.zeros(classes, dtype=torch.int64))
        self.register_buffer("mixed", torch.zeros(classes, width))
        self.register_buffer("seen", torch.zeros(classes, dtype=torch.bool))

    def schedule(self) -> Schedule:
        """The net, then the relation module."""
        net = Phase("net")
        relation = Phase("relation", "relation_loss", Selector(("relation",)), lockstep=False)
        if not self.seen.any():  # nothing to compare with: not even weight decay or a norm layer may move the module
            return net, replace(relation, epochs=0)
        return (Alternate((net, relation), every="batch"),) if self.alternate == "batch" else (net, relation)

    def receive(self, downlink: Message) -> None:
        """Mix own and global features (eq. 8) and keep the result, for training and for the test afterwards."""
        super().receive(downlink)
        common, own = received_means(downlink, "pFedPM"), Prototypes(self.own_means, self.own_counts)
        mixed, seen = mixed_features(own, common, self.a)
        self.mixed.copy_(mixed)
        self.seen.copy_(seen)

    def objective(self, batch: Batch) -> Terms:
        """Cross-entropy and the pull of the batch's class means towards C̃ (eq. 9)."""
        inputs, labels = batch
        features = self.net.body(inputs)
        ce = cross_entropy(self.net.head(features), labels)
        if self.lam == 0:  # 0·NaN is NaN: no diverged client may reach the others through a term that is off
            return {"ce": ce}
        means, counts = batch_means(features.flatten(1), labels, self.net.num_classes)
        pulled = (counts > 0) & self.seen
        if self.a == 1:
            pulled = pulled & (self.own_counts > 0)
        return {"ce": ce, "align": self.lam * feature_distance(means, self.mixed, pulled, self.distance)}

    def relation_loss(self, batch: Batch) -> Terms:
        """Squared error of the scores against 1[y = j] over all classes that have a C̃_j (eq. 12)."""
        inputs, labels = batch
        with torch.no_grad(), evaluating(self.net.body):
            features = self.net.body(inputs)
        scores = self._scores(features)
        errors = (scores - one_hot(labels, self.net.num_classes).to(scores.dtype)).square()
        return {"mse": errors[:, self.seen].sum() / len(labels)}

    def predict(self, inputs: Tensor) -> Tensor:
        """Logits of the decision module, or scores of the relation module (their softmax ranks alike), [B, C].

        Before the relation module has anything to compare with, the decision module stands in for it.
        """
        if self.judged_module == "decision" or not self.seen.any():
            return self.net(inputs)
        return self._scores(self.net.body(inputs))

    def plain_net(self, model: Literal["personal", "global"]) -> Net | None:
        """The net, where the decision module decides."""
        return self.net if self.judged_module == "decision" else None

    def reply(self, shard: Shard) -> Uplink:
        """The class means of the trained body (eq. 6), which the client also keeps as its own for the next round."""
        own = class_means(self.net.body, shard.train, shard.num_classes)
        self.own_means.copy_(own.means)
        self.own_counts.copy_(own.counts)
        return Uplink(prototypes=own, client=shard.client, num_examples=shard.num_examples)

    def _scores(self, features: Tensor) -> Tensor:
        """R_sj of all examples and classes [B, C] (eq. 13), 0 for a class without C̃."""
        known = self.mixed[self.seen].view(-1, *self.net.feature_shape)
        scores = features.new_zeros(len(features), len(self.seen))
        single = len(features) * len(known) == 1  # one pair has no variance to normalise by
        with evaluating(self.relation.norm) if single else nullcontext():
            scores[:, self.seen] = self.relation(features, known)
        return scores


def mixed_features(own: Prototypes, common: Prototypes, a: float) -> tuple[Tensor, Tensor]:
    """C̃_j = a·C_j + (1−a)·C̄_j (pFedPM eq. 8), or the one that is there.

    Args:
        own: the client's class means, [C, D] and [C].
        common: the server's.
        a: weight of the own means.

    Returns:
        [C, D], and [C] bool: which classes have a C̃ (the other rows are 0).
    """
    held, known = (own.counts > 0)[:, None], (common.counts > 0)[:, None]
    both = a * own.means + (1 - a) * common.means if a < 1 else own.means  # 0·NaN is NaN
    one = torch.where(held, own.means, torch.where(known, common.means, torch.zeros_like(common.means)))
    return torch.where(held & known, both, one), (held | known)[:, 0]


def batch_means(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Mean feature of every class in a batch, with its gradient.

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


def feature_distance(means: Tensor, mixed: Tensor, pulled: Tensor, distance: Distance) -> Tensor:
    """R, the distance between class means and C̃, averaged over some classes (pFedPM eq. 11).

    Args:
        means: [C, D], with a gradient.
        mixed: [C, D].
        pulled: [C] bool, which classes count; with none the term is 0.
        distance: "mse" or "l2".
    """
    difference = torch.where(pulled[:, None], means - mixed, 0)
    each = difference.square().mean(1) if distance == "mse" else torch.linalg.vector_norm(difference, dim=1)
    return (each * pulled).sum() / pulled.sum().clamp(min=1)


def one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """1[y_s = j], [B, C] bool."""
    return labels[:, None] == torch.arange(num_classes, device=labels.device)
