"""pFedFDA: the head is a Gaussian classifier, between the client's own statistics and the global ones."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear

from lightning_modules.anchor import Anchor
from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.losses import cross_entropy
from lightning_modules.nets.net import Net, evaluating
from lightning_modules.phases import Phase, Schedule
from lightning_modules.prototypes import all_features, class_sums
from lightning_modules.training import Training
from pflsim.config.settings import Count
from pflsim.config.validate import Positive
from pflsim.data.federated import Shard
from pflsim.messages import Message, Uplink
from pflsim.params import BODY, snapshot
from pflsim.servers.pfedfda import COVARIANCE, MEANS, lower_triangle, symmetric

SHRINKAGE = 1e-4
"""ε, of the covariance towards a multiple of the identity, and of the class shares towards each other."""
LBFGS = {"maxiter": 10, "gtol": 1e-3}
"""Options of the search for β; those of the authors' program."""
GRID = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Values of β, the best of which the search begins at."""
Gaussian = tuple[Tensor, Tensor]
"""Class means [C, D] and their common covariance [D, D], float64 on the CPU."""


class PFedFDA(ClientModule):
    """Trains the body under the classifier of the global Gaussian (McLaughlin and Su, NeurIPS 2024).

    The classifier of class means μ, covariance Σ and class shares π is linear discriminant analysis. Before it
    predicts, and when it replies, a client computes the Gaussian (μ̂, Σ̂) of its training examples' features and
    interpolates: μ = β₁·μ̂ + (1 − β₁)·μ^g and Σ = β₂·Σ̂ + (1 − β₂)·Σ^g. β minimises the cross-entropy of two-fold
    cross-validation over [0, 1]². The client sends body, μ and Σ. Reported model: the newest mean body with the
    client's classifier on it.

    Args:
        net: body and head; the head is not used.
        training: the run's local training settings.
        single_beta: β₁ = β₂.
        min_count: classes with fewer examples have the mean μ^g.
        cov_ridge: added to the diagonal of Σ̂. The authors' program adds 1, and 0.0001 to each entry.

    Notes:
        - Statistics are those of one pass after local training, in evaluation mode. Σ̂ is positive semidefinite by
          construction, so no eigenvalue is clipped.
        - Folds are stratified, with a fixed seed. Classes with one example are left out; without others, β = 0. If the
          cross-entropy is not finite, β stays as it was.
        - L-BFGS begins at the best of the points 0, ¼, ..., 1 of each β; in the authors' program at ½, which can end
          in a local minimum.
    """

    lockstep = True
    needs_classes = True
    shared = BODY
    reported_phase = "received"
    weight: Tensor
    bias: Tensor
    beta: Tensor

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        single_beta: bool = False,
        min_count: Count = 2,
        cov_ridge: Positive = 1e-4,
    ):
        super().__init__(net, training)
        self.min_count, self.cov_ridge = min_count, cov_ridge
        self.received = Anchor()
        self.register_buffer("weight", torch.zeros(net.num_classes, net.feature_width))
        self.register_buffer("bias", torch.zeros(net.num_classes))
        self.register_buffer("beta", torch.full((1 if single_beta else 2,), 0.5))

    def schedule(self) -> Schedule:
        """Return one phase that trains the body."""
        return (Phase(trainable=BODY),)

    def receive(self, downlink: Message) -> None:
        """Load the body and store the global Gaussian."""
        super().receive(downlink)
        self.received.store(downlink.extra)

    def before_training(self, shard: Shard) -> None:
        """Compute the classifier of the global Gaussian."""
        self._classify_by(self._common(), shard)

    def before_evaluation(self, shard: Shard) -> None:
        """Compute the client's own classifier on the received body; after local training `reply` has done so."""
        if self.received.tensors:
            self._personalise(shard)

    def objective(self, batch: Batch) -> Terms:
        """Return the cross-entropy of the fixed classifier, which is large where Σ is nearly singular."""
        inputs, labels = batch
        return {"lda": self.task_loss(self.predict(inputs), labels)}

    def predict(self, inputs: Tensor) -> Tensor:
        """Return log p(z, k) of each class k, up to a term that the classes share, [B, C]."""
        features = self.net.body(inputs).flatten(1).to(self.weight.dtype)
        with torch.autocast(features.device.type, enabled=False):  # the weights are large
            return linear(features, self.weight, self.bias)

    def reply(self, shard: Shard) -> Uplink:
        """Return body, μ and Σ."""
        means, covariance = (tensor.to(self.weight.dtype) for tensor in self._personalise(shard))
        return replace(super().reply(shard), extra=snapshot({MEANS: means, COVARIANCE: lower_triangle(covariance)}))

    def _common(self) -> Gaussian:
        """Return μ^g and Σ^g."""
        means, triangle = (self.received.tensors[key].cpu().double() for key in (MEANS, COVARIANCE))
        return means, symmetric(triangle, self.net.feature_width)

    def _classify_by(self, gaussian: Gaussian, shard: Shard) -> None:
        for own, value in zip((self.weight, self.bias), discriminant(gaussian, class_shares(shard)), strict=True):
            own.copy_(value)

    def _personalise(self, shard: Shard) -> Gaussian:
        """Compute β, load the classifier of μ and Σ, and return both."""
        with evaluating(self.net.body):
            features = all_features(self.net.body, shard.train).cpu().double()
        labels, common = shard.train.y.cpu(), self._common()
        self.beta.copy_(self._best_beta(features, labels, common, class_shares(shard)))
        found = interpolated(self.beta.cpu().double(), self._gaussian(features, labels, common), common)
        self._classify_by(found, shard)
        return found

    def _gaussian(self, features: Float[Tensor, "n D"], labels: Int[Tensor, " n"], common: Gaussian) -> Gaussian:
        """Return μ̂ and Σ̂ of some examples."""
        classes, n = len(common[0]), len(labels)
        counts = torch.bincount(labels, minlength=classes)[:, None]
        own = class_sums(features, labels, classes) / counts.clamp(min=1)
        means = torch.where(counts >= self.min_count, own, common[0])
        centred = features - means[labels]
        covariance = centred.T @ centred / max(n - 1, 1)
        covariance.diagonal().add_(self.cov_ridge)
        return means, covariance

    def _best_beta(self, features: Tensor, labels: Tensor, common: Gaussian, shares: Tensor) -> Tensor:
        """Return the β of the smallest cross-entropy in two-fold cross-validation."""
        from scipy.optimize import minimize  # takes a second to import, as the next one
        from sklearn.model_selection import StratifiedKFold

        rows = (torch.bincount(labels, minlength=len(shares))[labels] >= 2).nonzero()[:, 0]
        if not len(rows):
            return torch.zeros_like(self.beta)
        folds = []
        for train, held in StratifiedKFold(2, shuffle=True, random_state=0).split(rows, labels[rows]):
            own = self._gaussian(features[rows[train]], labels[rows[train]], common)
            folds.append((own, features[rows[held]], labels[rows[held]]))

        def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
            beta = torch.from_numpy(point).requires_grad_()
            heads = [discriminant(interpolated(beta, own, common), shares) for own, *_ in folds]
            parts = zip(heads, folds, strict=True)
            total = torch.stack([cross_entropy(linear(held, *head), y) for head, (_, held, y) in parts]).sum()
            return total.item(), torch.autograd.grad(total, beta)[0].numpy()

        points = {point: loss(np.array(point))[0] for point in product(GRID, repeat=len(self.beta))}
        values = {point: value for point, value in points.items() if math.isfinite(value)}
        if not values:
            return self.beta
        start, bounds = np.array(min(values, key=values.__getitem__)), [(0.0, 1.0)] * len(self.beta)
        found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=LBFGS)
        return torch.from_numpy(found.x if found.fun < values[tuple(start)] else start)


def class_shares(shard: Shard) -> Float[Tensor, " C"]:
    """Return π of the training examples, float64 on the CPU; positive for classes without examples."""
    shares = torch.bincount(shard.train.y, minlength=shard.num_classes).cpu().double() / shard.num_examples
    return (shares + SHRINKAGE) / (1 + shard.num_classes * SHRINKAGE)


def interpolated(beta: Float[Tensor, " 1|2"], own: Gaussian, common: Gaussian) -> Gaussian:
    """Return β·own + (1 − β)·common, with the first entry of β for the means and the last one for the covariance."""
    means, covariance = (b * a + (1 - b) * c for b, a, c in zip(beta.expand(2), own, common, strict=True))
    return means, covariance


def discriminant(gaussian: Gaussian, shares: Float[Tensor, " C"]) -> tuple[Tensor, Tensor]:
    """Return weight [C, D] and bias [C] of linear discriminant analysis: Σ̄⁻¹μ_k and log π_k − ½·μ_kᵀΣ̄⁻¹μ_k.

    Σ̄ = (1 − ε)·Σ + ε·tr(Σ)/D·I.
    """
    means, covariance = gaussian
    identity = torch.eye(len(covariance), dtype=covariance.dtype)
    shrunk = (1 - SHRINKAGE) * covariance + SHRINKAGE * covariance.trace() / len(covariance) * identity
    weight = torch.linalg.solve(shrunk, means.T).T
    return weight, shares.log() - (weight * means).sum(1) / 2
