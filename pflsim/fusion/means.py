"""Means over clients, accumulated in float64 in the order of the stack."""

import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Num
from torch import Tensor

from pflsim.messages import Uplink
from pflsim.types import Tensors

Stack = Float[Tensor, " K *shape"] | Sequence[Float[Tensor, " *shape"]]
"""One tensor of K clients: [K, *shape], or a list of K tensors [*shape]."""


def column(weights: Sequence[Tensors], key: str) -> list[Tensor]:
    """Return the tensors of one name, one per client, without copying.

    Raises:
        ValueError: their shapes differ.
    """
    found = [tensors[key] for tensors in weights]
    if len({tensor.shape for tensor in found}) > 1:
        raise ValueError(f"{key} has different shapes: {[tuple(tensor.shape) for tensor in found]}")
    return found


def weighted_mean(
    stack: Stack, weights: Num[Tensor, " K"], dtype: torch.dtype | None = None
) -> Float[Tensor, " *shape"]:
    """Average K clients' tensors with the given weights.

    `mean = Σ_k (p_k / Σ p) · stack_k`

    Args:
        stack: [K, *shape], or a list of K tensors.
        weights: [K] weights p, used as float64; only their ratios matter.
        dtype: dtype of the mean; None: that of the stack.

    Returns:
        [*shape] on the device of the stack. With K = 1 the result equals the tensor exactly.

    Raises:
        TypeError: the stack is not floating point.
        ValueError: there are no clients, a weight is negative or not finite, or the weights sum to zero.

    Example:
        >>> weighted_mean(torch.tensor([[0.0], [4.0]]), torch.tensor([3, 1]))
        tensor([1.])
    """
    given = weights.double().tolist()
    total = math.fsum(given)
    if min(given) < 0 or not 0 < total < math.inf:
        raise ValueError(f"weights must be finite, not negative, and not all zero, got {given}")
    first = stack[0]
    if not first.is_floating_point():
        raise TypeError(f"a tensor of {first.dtype} cannot be averaged; only floating point tensors are fused")
    mean = torch.zeros_like(first, dtype=torch.float64)
    for tensor, weight in zip(stack, given, strict=True):
        mean.add_(tensor, alpha=weight / total)
    return mean.to(dtype or first.dtype)


def uniform_mean(stack: Stack, dtype: torch.dtype | None = None) -> Float[Tensor, " *shape"]:
    """Average K clients' tensors with equal weights 1/K (pFedCFR eq 12).

    Args:
        stack: [K, *shape], or a list of K tensors.
        dtype: dtype of the mean; None: that of the stack.

    Returns:
        [*shape] on the device of the stack.

    Raises:
        TypeError: the stack is not floating point.
        ValueError: there are no clients.
    """
    return weighted_mean(stack, torch.ones(len(stack), dtype=torch.float64), dtype)


def example_means(uplinks: Sequence[Uplink], keys: Iterable[str]) -> dict[str, Tensor]:
    """Return the means of the clients' weights of these names, weighted by training examples (FedAvg)."""
    examples = torch.tensor([u.num_examples for u in uplinks], dtype=torch.float64)
    return {key: weighted_mean(column([u.weights for u in uplinks], key), examples) for key in keys}
