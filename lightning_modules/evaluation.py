"""Counting what a model gets right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pflsim.data.federated import Examples


def count(predict: Callable[[Tensor], Tensor], examples: Examples, batch_size: int) -> tuple[int, float]:
    """How many examples a model classifies rightly, and the sum of their cross-entropy in nats.

    Args:
        predict: inputs [B, ...] → scores [B, C], of a module in evaluation mode.
        examples: all are counted.
        batch_size: examples per forward pass.
    """
    correct, loss = 0, 0.0
    with torch.inference_mode():
        for index in torch.arange(len(examples)).split(batch_size):
            inputs, labels = examples.batch(index)
            scores = predict(inputs)
            # A model that has diverged knows nothing: argmax of NaN would credit it with one class.
            correct += int(((scores.argmax(1) == labels) & scores.isfinite().all(1)).sum())
            loss += float(functional.cross_entropy(scores, labels, reduction="sum"))
    return correct, loss
