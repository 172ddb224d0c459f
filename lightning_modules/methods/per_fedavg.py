"""Per-FedAvg: a global model for fast adaptation (MAML)."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from lightning_modules.base import ClientModule, Evaluate, Evaluation
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.config.validate import NonNegative
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
        alpha: α ≥ 0; None: the run's lr. 0 is FedAvg trained on the second halves.
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
        alpha: NonNegative | None = None,
        variant: Literal["fo", "hf"] = "fo",
        delta: Annotated[float, Ge(MIN_DELTA)] = 1e-3,
    ):
        super().__init__(net, training)
        training.require_sgd("per_fedavg")
        self.alpha = training.lr if alpha is None else alpha
        self.delta, self.variant = delta, variant
        self.lockstep = variant == "fo"  # a trace has no random state to go back to

    @property
    def smallest_batch(self) -> int:
        """Minimum number of examples per batch: each half needs 2 with batch normalisation."""
        per_half = super().smallest_batch
        return 2 * per_half if per_half > 1 else 1

    def gradients(self, evaluate: Evaluate, values: Sequence[Tensor], size: int) -> Evaluation:
        """Return g at w̃; for "hf", minus α times the Hessian-vector product."""
        middle = size // 2
        inner, outer = slice(middle or size), slice(middle, size)
        terms, found = evaluate(_moved(values, evaluate(values, inner)[1], -self.alpha), outer)
        if self.variant == "hf":
            with torch.random.fork_rng(devices=[v.device for v in values[:1] if v.is_cuda]):
                ahead = evaluate(_moved(values, found, self.delta), inner)[1]
            behind = evaluate(_moved(values, found, -self.delta), inner)[1]  # same dropout as `ahead`
            scale, parts = self.alpha / (2 * self.delta), zip(found, ahead, behind, strict=True)
            found = [g if g is None or a is None or b is None else g - scale * (a - b) for g, a, b in parts]
        return terms, found

    def before_evaluation(self, shard: Shard) -> None:
        """Take one step with α on the mean loss of the training shard (eq. 3)."""
        n, parameters = shard.num_examples, list(self.net.parameters())
        if n < self.smallest_batch:
            return
        self.train()
        sums = [torch.zeros_like(p) for p in parameters]
        for index in torch.arange(n).tensor_split(-(-n // 1024)):
            loss = torch.stack(list(self.objective(shard.train.batch(index)).values())).sum() * (len(index) / n)
            found = torch.autograd.grad(loss, parameters, materialize_grads=True)
            for total, gradient in zip(sums, found, strict=True):
                total.add_(gradient)
        with torch.no_grad():
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.add_(total, alpha=-self.alpha)


def _moved(values: Sequence[Tensor], direction: Sequence[Tensor | None], length: float) -> list[Tensor]:
    """Return values + length · direction, where None is no direction."""
    return [v if d is None else v + length * d for v, d in zip(values, direction, strict=True)]
