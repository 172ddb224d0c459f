"""Per-FedAvg: a global model for fast adaptation (MAML)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase
from lightning_modules.training import Training
from pflsim.config.validate import Bounds, non_negative
from pflsim.data.federated import Shard

MIN_DELTA = 1e-6
"""Lower bound of the step δ of the finite differences."""


class PerFedAvg(ClientModule):
    """Minimises the loss after one local gradient step (Fallah et al. 2020, eq. 3, Algorithm 1).

    With the halves D and D' of a mini-batch, w̃ = w − α·∇f(w, D), g = ∇f(w̃, D') and the run's learning rate β:

        fo: w ← w − β·g
        hf: w ← w − β·(g − α·d),    d = [∇f(w + δ·g, D) − ∇f(w − δ·g, D)] / 2δ ≈ ∇²f(w, D)·g

    Reported model: as received, after one step w − α·∇f(w) on the whole training shard.

    Args:
        net: body and head.
        training: the run's local training settings.
        alpha: α ≥ 0; 0 is FedAvg trained on the second halves.
        variant: without the Hessian ("fo"), or with a Hessian-vector product from two gradients ("hf").
        delta: δ of "hf", at least 1e-6; below that, single precision loses the difference of the gradients.

    Notes:
        - The paper draws D, D' and the Hessian's batch D'' independently. Here D and D' are the halves of one batch and
          D'' = D, so for δ → 0 "hf" is the exact gradient of f(w − α·∇f(w, D), D').
        - D' is the larger half of an odd batch. With one example D = D'.
        - Every forward pass updates running statistics.
        - lr_decay, momentum and weight decay of the run apply to the step with β only.
    """

    reported_phase = "received"

    def __init__(
        self,
        net: Net,
        training: Training,
        *,
        alpha: float = 0.01,
        variant: Literal["fo", "hf"] = "fo",
        delta: float = 1e-3,
    ):
        super().__init__(net, training)
        self.alpha, self.delta = non_negative("method.alpha", alpha), Bounds(MIN_DELTA)("method.delta", delta)
        self.variant = variant

    @property
    def smallest_batch(self) -> int:
        """Minimum number of examples per batch: each half needs 2 with batch normalisation."""
        per_half = super().smallest_batch
        return 2 * per_half if per_half > 1 else 1

    def gradients(self, batch: Batch, phase: Phase, parameters: Sequence[nn.Parameter]) -> Terms:
        """Compute g after the inner step; for "hf", subtract the Hessian-vector product."""
        inner, outer = halves(batch)
        start = [p.detach().clone() for p in parameters]

        def at(half: Batch, direction: Sequence[Tensor] = start, length: float = 0.0) -> tuple[Terms, Sequence[Tensor]]:
            """Return loss terms and gradients at start + length · direction."""
            _set_parameters(parameters, start, direction, length)
            terms: Terms = getattr(self, phase.objective)(half)
            return terms, torch.autograd.grad(torch.stack(list(terms.values())).sum(), parameters)

        terms, found = at(outer, at(inner)[1], -self.alpha)
        if self.variant == "hf":
            with torch.random.fork_rng(devices=[p.device for p in parameters[:1] if p.is_cuda]):
                ahead = at(inner, found, self.delta)[1]
            behind = at(inner, found, -self.delta)[1]  # same dropout as `ahead`
            scale = self.alpha / (2 * self.delta)
            found = [g - scale * (a - b) for g, a, b in zip(found, ahead, behind, strict=True)]
        _set_parameters(parameters, start, start, 0.0)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        return {name: value.detach() for name, value in terms.items()}

    def before_evaluation(self, shard: Shard) -> None:
        """Take one step with α on the mean loss of the training shard (eq. 3)."""
        n, parameters = shard.num_examples, list(self.net.parameters())
        if n < self.smallest_batch:
            return
        self.train()
        sums = [torch.zeros_like(p) for p in parameters]
        for index in torch.arange(n).tensor_split(-(-n // 1024)):
            loss = torch.stack(list(self.objective(shard.train.batch(index)).values())).sum() * (len(index) / n)
            for total, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
                total.add_(gradient)
        _set_parameters(parameters, [p.detach().clone() for p in parameters], sums, -self.alpha)


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Return the first ⌊B/2⌋ examples and the others; both are the whole batch if it has one example."""
    inputs, labels = batch
    middle = len(labels) // 2
    rest = inputs[middle:], labels[middle:]
    return ((inputs[:middle], labels[:middle]) if middle else rest), rest


def _set_parameters(
    parameters: Sequence[nn.Parameter], start: Sequence[Tensor], direction: Sequence[Tensor], length: float
) -> None:
    """Set parameters to start + length · direction."""
    with torch.no_grad():
        for parameter, origin, step in zip(parameters, start, direction, strict=True):
            parameter.copy_(origin + length * step)
