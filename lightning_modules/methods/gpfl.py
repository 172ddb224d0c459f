"""GPFL: global and personal features of one body, by a conditional valve."""

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, relu

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import cross_entropy, proximal
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.config.validate import NonNegative
from pflsim.data.federated import Shard
from pflsim.params import Selector


class GPFL(ClientModule):
    """Trains global and personal features of one body together (Zhang et al. 2023, eqs. 3 to 11, Algorithm 1).

    Minimises CE(ψ(f^P), y) − log softmax_y cos(f^G, C) + λ·‖f^G − Ĉ_y‖ + μ/2·(‖V‖² + ‖C‖²) over all parameters. The
    valve V (CoV) maps the body's features f to f^G under the condition g and to f^P under the condition p. C (GCE)
    holds one embedding per class; Ĉ is the received C, fixed for the round. g is the mean of Ĉ over the classes, and p
    is the mean weighted by the client's class shares. Body, V and C are shared; the head ψ is private. Reported model:
    ψ(f^P), after local training.

    Args:
        net: body and head.
        training: the run's local training settings.
        lam: λ ≥ 0, penalty towards the fixed embeddings. The authors: 0.01 for CNN and MLP, 0.0001 for ResNet-18.
        mu: μ ≥ 0, weight decay of V and C. The authors: 0.1 for CNN and MLP, 0 for ResNet-18.

    Notes:
        - Eq. 7 divides p by the number of classes although the shares sum to one. Here p is the weighted mean, so a
          client with equal shares has p = g.
        - Eq. 11 prints the norms of V and C. Here they are squared, as weight decay.
        - Eq. 9 is averaged over the examples of a batch, like the other terms.
        - p is part of the client's state, since the reported model uses it after the round.
    """

    lockstep = True
    needs_classes = True
    shared = Selector(("net.body", "embeddings", "valve"))
    personal: Tensor

    def __init__(self, net: Net, training: Training, *, lam: NonNegative = 0.01, mu: float = 0.1):
        super().__init__(net, training)
        self.lam, self.mu = lam, training.penalty("method.mu", mu)
        self.embeddings = nn.Embedding(net.num_classes, net.feature_width)
        self.valve = ConditionalValve(net.feature_width)
        self.fixed = Anchor()
        self.register_buffer("personal", torch.zeros(net.feature_width))

    def schedule(self) -> Schedule:
        """Return one phase that trains all parameters, including valve and embeddings."""
        return (Phase(trainable=Selector(("",))),)

    def before_training(self, shard: Shard) -> None:
        """Store the received embeddings and compute both conditions from them (eqs. 5 to 7)."""
        received = self.embeddings.weight.detach()
        shares = torch.bincount(shard.train.y, minlength=len(received)).to(received) / max(shard.num_examples, 1)
        self.fixed.store({"embeddings": received, "condition": received.mean(0)})
        self.personal.copy_(shares @ received)

    def objective(self, batch: Batch) -> Terms:
        """Return the terms of eq. 11: personal task, angle and magnitude guidance, weight decay."""
        inputs, labels = batch
        features, fixed = self.net.body(inputs).flatten(1), self.fixed.tensors
        guided = self.valve(features, fixed["condition"])
        angles = normalize(guided) @ normalize(self.embeddings.weight).T
        shared = (*self.valve.parameters(), *self.embeddings.parameters())
        return {
            self.loss_name: self.task_loss(self.decide(features), labels),
            "angle": cross_entropy(angles, labels),
            "magnitude": self.lam * torch.linalg.vector_norm(guided - fixed["embeddings"][labels], dim=1).mean(),
            "decay": proximal(((w, w.new_zeros(())) for w in shared), self.mu),
        }

    def decide(self, features: Tensor) -> Tensor:
        """Return the logits ψ(f^P), [B, C], of flat features [B, D]."""
        return self.net.head(self.valve(features, self.personal).view(-1, *self.net.feature_shape))

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the logits of the personal path."""
        return self.decide(self.net.body(inputs).flatten(1))


class ConditionalValve(nn.Module):
    """Computes ReLU((γ + 1)·f + β), where γ and β depend on a condition (eqs. 3, 4).

    γ and β each have their own layers: fully connected, ReLU, layer normalisation.

    Args:
        width: D, of the features and of the condition.
    """

    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))
        self.beta = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        """Map features [B, D] and a condition [D] to [B, D]."""
        return relu((self.gamma(condition) + 1) * features + self.beta(condition))
