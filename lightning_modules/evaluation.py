"""Counting what a model gets right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pflsim.data.federated import Examples


def count(predict: Callable[[Tensor], Tensor], examples: Examples, batch_size: int | None = None) -> tuple[int, float]:
    """How many examples a model classifies rightly, and the sum of their cross-entropy in nats.

    Args:
        predict: inputs [B, ...] → scores [B, C], of a module in evaluation mode.
        examples: all are counted.
        batch_size: examples per forward pass; None: as suits the device.
    """
    correct = torch.zeros((), dtype=torch.int64, device=examples.y.device)
    loss = torch.zeros((), dtype=torch.float64, device=examples.y.device)
    with torch.inference_mode():
        for inputs, labels in examples.in_turn(batch_size):
            scores = predict(inputs)
            # A model that has diverged knows nothing: argmax of NaN would credit it with one class.
            correct += ((scores.argmax(1) == labels) & scores.isfinite().all(1)).sum()
            loss += functional.cross_entropy(scores, labels, reduction="sum")
    return int(correct), float(loss)
