"""Counting what a model gets right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pflsim.data.federated import Examples


def count(
    predict: Callable[[Tensor], Tensor],
    examples: Examples,
    batch_size: int | None = None,
    pairs: list[Tensor] | None = None,
) -> tuple[int, float]:
    """How many examples a model classifies rightly, and the sum of their cross-entropy in nats.

    Args:
        predict: inputs [B, ...] → scores [B, C], of a module in evaluation mode.
        examples: all are counted.
        batch_size: examples per forward pass; None: as suits the device.
        pairs: is given [B, 2] of every forward pass: the class, and the predicted one (−1: scores that are not finite).
    """
    correct = torch.zeros((), dtype=torch.int64, device=examples.y.device)
    loss = torch.zeros((), dtype=torch.float64, device=examples.y.device)
    with torch.inference_mode():
        for inputs, labels in examples.in_turn(batch_size):
            scores = predict(inputs)
            # A model that has diverged knows nothing: argmax of NaN would credit it with one class.
            predicted = scores.argmax(1).masked_fill_(~scores.isfinite().all(1), -1)
            correct += (predicted == labels).sum()
            if pairs is not None:
                pairs.append(torch.stack((labels, predicted), dim=1))
            loss += functional.cross_entropy(scores, labels, reduction="sum")
    return int(correct), float(loss)


def confusion(pairs: list[Tensor]) -> tuple[tuple[int, int, int], ...]:
    """How often each pair of classes occurs: (class, predicted class, how many), ascending."""
    if not pairs:
        return ()
    found, counts = torch.cat(pairs).unique(dim=0, return_counts=True)
    return tuple((*pair, n) for pair, n in zip(found.tolist(), counts.tolist(), strict=True))
