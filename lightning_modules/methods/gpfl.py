"""GPFL: one body, a global and a personal path through a conditional valve."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import cross_entropy, proximal
from lightning_modules.nets.net import Net
from lightning_modules.nets.valve import ConditionalValve
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.validate import non_negative
from pflsim.data.federated import Shard
from pflsim.params import Selector


class GPFL(ClientModule):
    """Global and personal features of one body at once (Zhang et al. 2023, eqs. 3 to 11, Algorithm 1).

    CE(ψ(f^P), y) − log softmax_y cos(f^G, C) + λ·‖f^G − Ĉ_y‖ + μ/2·(‖V‖² + ‖C‖²), all parameters trained at once.
    f^G and f^P are the body's features f through the valve V (CoV) under the conditions g and p. C (GCE) has an
    embedding of every class; Ĉ is C as received, fixed for the round. g is the mean of Ĉ over the classes, p the mean
    weighted by the client's class shares. Body, V and C are shared, the head ψ is private. Judged by ψ(f^P) after local
    training.

    Args:
        net: body and head.
        training: the run's local training settings.
        lam: λ ≥ 0, the pull towards the fixed embeddings. The authors: 0.01 for CNN and MLP, 0.0001 for ResNet-18.
        mu: μ ≥ 0, weight decay of V and C. The authors: 0.1 for CNN and MLP, 0 for ResNet-18.

    Notes:
        - Eq. 7 divides p by the number of classes, though the shares already sum to one; here p is the weighted mean,
          so that for a client with all classes alike p = g.
        - Eq. 11 prints the norms of V and C; as weight decay their squares are meant.
        - Eq. 9 is a mean over the examples of a batch, as the other terms are.
        - p is kept with the client until the next round, since it is judged with it.
    """

    lockstep = True
    shared = Selector(("net.body", "embeddings", "valve"))
    personal: Tensor

    def __init__(self, net: Net, training: Training, *, lam: float = 0.01, mu: float = 0.1):
        super().__init__(net, training)
        self.lam, self.mu = non_negative("method.lam", lam), training.penalty("method.mu", mu)
        self.embeddings = nn.Embedding(net.num_classes, net.feature_width)
        self.valve = ConditionalValve(net.feature_width)
        self.fixed = Anchor()
        self.register_buffer("personal", torch.zeros(net.feature_width))

    def schedule(self) -> Schedule:
        """All parameters at once, the valve and the embeddings too."""
        return (Phase(trainable=Selector(("",))),)

    def before_training(self, shard: Shard) -> None:
        """Fix the embeddings just received, and make both conditions of them (eqs. 5 to 7)."""
        received = self.embeddings.weight.detach()
        shares = torch.bincount(shard.train.y, minlength=len(received)).to(received) / max(shard.num_examples, 1)
        self.fixed.hold({"embeddings": received, "condition": received.mean(0)})
        self.personal.copy_(shares @ received)

    def objective(self, batch: Batch) -> Terms:
        """The personal task, the guidance by angle and by magnitude, and the decay (eq. 11)."""
        inputs, labels = batch
        features, fixed = self.net.body(inputs).flatten(1), dict(self.fixed.named_buffers())
        guided = self.valve(features, fixed["condition"])
        angles = normalize(guided) @ normalize(self.embeddings.weight).T
        shared = (*self.valve.parameters(), *self.embeddings.parameters())
        return {
            "ce": cross_entropy(self.decide(features), labels),
            "angle": cross_entropy(angles, labels),
            "magnitude": self.lam * torch.linalg.vector_norm(guided - fixed["embeddings"][labels], dim=1).mean(),
            "decay": proximal(((w, w.new_zeros(())) for w in shared), self.mu),
        }

    def decide(self, features: Tensor) -> Tensor:
        """ψ(f^P), logits [B, C] of flat features [B, D]."""
        return self.net.head(self.valve(features, self.personal).view(-1, *self.net.feature_shape))

    def predict(self, inputs: Tensor) -> Tensor:
        """The personal path."""
        return self.decide(self.net.body(inputs).flatten(1))
