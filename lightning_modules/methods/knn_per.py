"""kNN-Per: FedAvg's model, and a vote of the client's nearest training examples in its features."""

from dataclasses import replace
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn.functional import one_hot

from lightning_modules.anchor import Anchor
from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net, evaluating
from lightning_modules.prototypes import all_features
from lightning_modules.training import Training
from pflsim.config.settings import Count, Probability
from pflsim.data.federated import Shard
from pflsim.errors import SettingsError
from pflsim.tasks.task import in_float32

SHARES = [number / 10 for number in range(11)]
"""λ_i is one of these."""
LEAST = 1e-12
"""Scores are at least its logarithm."""


class KNNPer(ClientModule):
    """Predicts λ_i·p_kNN(c|x) + (1 − λ_i)·softmax(h(z))_c with FedAvg's h and z = f(x) (Marfoq et al., ICML 2022).

    p_kNN(c|x) = Σ_j e^{−d_j²/(D·s)}·1[y_j = c] / Σ_j e^{−d_j²/(D·s)} over the k training examples whose features z_j in
    R^D are nearest to z, with d_j = ‖z − z_j‖₂. λ_i is the share with the best accuracy on the client's validation
    examples; among equal ones, that with the lowest loss, then the smallest. Reported model: personal, as received.

    Args:
        net: body and head.
        training: the run's local training settings.
        neighbours: k; of equally distant examples, the first ones count.
        scale: s, at least 1e-9: the exponents stay finite.
        capacity: how many training examples are stored, drawn at random; None: all.
        lam: λ of all clients; None: each client chooses its own.

    Raises:
        SettingsError: `predict` is called outside of an evaluation, where no examples are stored.

    Notes:
        Features and λ_i are computed before each evaluation and discarded afterwards.
    """

    lockstep = True
    needs_classes = True
    reported_phase = "received"

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        neighbours: Count = 10,
        scale: Annotated[float, Ge(1e-9)] = 1.0,
        capacity: Count | None = None,
        lam: Probability | None = None,
    ):
        super().__init__(net, training)
        self.neighbours, self.scale, self.capacity, self.lam = neighbours, scale, capacity, lam
        self.needs_validation = "set method.lam" if lam is None else False
        self.store = Anchor()

    def before_evaluation(self, shard: Shard) -> None:
        """Store features and labels of the training examples, and choose λ_i."""
        kept = shard.train
        if self.capacity is not None and self.capacity < len(kept):
            rows = torch.randperm(len(kept))[: self.capacity].sort().values.to(kept.y.device)
            kept = replace(kept, x=kept.x[rows], y=kept.y[rows])
        with evaluating(self.net), self.autocast(), torch.no_grad():
            stored = {"features": in_float32(all_features(self.net.body, kept)), "labels": kept.y}
            self.store.store(stored)
            lam = self._chosen(shard) if self.lam is None else self.lam
        self.store.store({**stored, "lam": stored["features"].new_tensor(lam)})

    def _chosen(self, shard: Shard) -> float:
        """Return λ_i."""
        found = [self._distributions(inputs) for inputs, _ in shard.val.in_turn()]
        votes, own = map(torch.cat, zip(*found, strict=True))
        ranks: list[tuple[float, float, float]] = []
        for lam in SHARES:
            scores = _log_mean(votes, own, lam).double()
            wrong = int((scores.argmax(1) != shard.val.y).sum())
            ranks.append((wrong, -float(scores.gather(1, shard.val.y[:, None]).sum()), lam))
        return min(ranks)[2]

    def _distributions(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return p_kNN and the softmax of the head's scores, both [B, C]."""
        stored = self.store.tensors
        if not stored:
            raise SettingsError("kNN-Per predicts with the client's training examples: evaluate it in a run")
        features = self.net.body(inputs)
        z = in_float32(features.flatten(1))
        # matrix multiplication loses small distances to rounding
        distances = torch.cdist(z, stored["features"], compute_mode="donot_use_mm_for_euclid_dist")
        squares, rows = distances.square().sort(stable=True)  # topk does not say which of equal ones it takes
        squares, rows = squares[:, : self.neighbours], rows[:, : self.neighbours]
        weights = (-squares / (z.shape[1] * self.scale)).softmax(1)  # [B, k]
        labels = one_hot(stored["labels"][rows], self.net.num_classes)  # [B, k, C]
        return (weights[:, :, None] * labels).sum(1), in_float32(self.net.head(features)).softmax(1)

    def predict(self, inputs: Tensor) -> Tensor:
        """Return log(λ_i·p_kNN + (1 − λ_i)·softmax(h(z))), [B, C]."""
        votes, own = self._distributions(inputs)
        return _log_mean(votes, own, self.store.tensors["lam"])

    def predict_global(self, inputs: Tensor) -> Tensor:
        """Return scores of FedAvg's model, [B, C]."""
        return self.net(inputs)


def _log_mean(votes: Tensor, own: Tensor, lam: Tensor | float) -> Tensor:
    return (lam * votes + (1 - lam) * own).clamp(min=LEAST).log()
