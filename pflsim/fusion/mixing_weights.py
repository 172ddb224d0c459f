"""Learned mixing weights and their gradient."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor
from torch.nn import functional

from pflsim.fusion.blocks import Rows, Workspace, blocks, products_device

Normaliser = Literal["softmax", "relu"]


def mixing_weights(
    scores: Float[Tensor, "R L N"], receivers: Sequence[int], normaliser: Normaliser
) -> Float64[Tensor, "R L N"]:
    """Map scores to weights over the N clients that sum to one for each unit (pFedLA eq. 3).

    `α_j = e^{s_j} / Σ_m e^{s_m}` (softmax), or `α_j = max(s_j, 0) / Σ_m max(s_m, 0)` (relu). With relu, a unit without
    positive scores has weight 1 on the receiver itself.

    Args:
        scores: [R, L, N], used as float64.
        receivers: the R clients of the rows.
        normaliser: softmax or relu.

    Returns:
        [R, L, N], differentiable with respect to the scores.
    """
    s = scores.double()
    if normaliser == "softmax":
        return s.softmax(dim=2)
    clipped = functional.relu(s)
    total = clipped.sum(dim=2, keepdim=True)
    index = torch.tensor(receivers, dtype=torch.int64, device=s.device)
    own = functional.one_hot(index, s.shape[2]).to(s)[:, None]
    return torch.where(total > 0, clipped / torch.where(total > 0, total, 1.0), own)


def mixing_gradient(
    weights: Float[Tensor, "R N"], stack: Rows, targets: Float[Tensor, " R P"] | Sequence[Float[Tensor, " P"]]
) -> Float64[Tensor, "R N"]:
    """Return the gradient of half the squared distance between mixture and target with respect to the mixing weights.

    `∂/∂α_rj ½‖w̄_r − t_r‖² = ⟨w_j, w̄_r − t_r⟩` with `w̄_r = Σ_m α_rm · w_m`

    Args:
        weights: [R, N] α, used as float64.
        stack: [N, P] or N rows, one flattened unit per client; gradients of several tensors may be added.
        targets: [R, P] or R rows, the target of each receiver's mixture.

    Returns:
        [R, N].

    Notes:
        The mixture is rounded to the dtype of the stack, as `mix` does. Sums use float64, since the w_j are nearly
        equal and only differences between the products matter. Only one block of columns is held in float64 (N = R =
        100, P = 600,000: 0.5 s on one core).
    """
    first, device = stack[0], products_device(stack)
    alpha = weights.to(device, torch.float64)
    gradient = torch.zeros_like(alpha)
    sizes = len(targets), len(first)
    products = Workspace(*sizes, torch.float64, device)
    rounded = Workspace(*sizes, first.dtype, device)
    for block, target in zip(blocks(stack, device), blocks(targets, device), strict=True):
        width = block.shape[1]
        mixture = torch.mm(alpha, block, out=products.columns(width))
        mixture.copy_(rounded.columns(width).copy_(mixture))
        gradient.addmm_(mixture.sub_(target), block.T)
    return gradient.to(first.device)


def largest_own(weights: Float[Tensor, "R L N"], receivers: Sequence[int], count: int) -> Bool[Tensor, "R L"]:
    """Return a mask of the units on which a receiver has its largest self weights (HeurpFedLA eq. 12, function AT_k).

    Args:
        weights: [R, L, N] α.
        receivers: the R clients of the rows.
        count: k of the L units; ties go to the first.

    Returns:
        [R, L] bool, with k true entries per row.
    """
    own = weights[torch.arange(len(receivers)), :, torch.tensor(receivers, dtype=torch.int64)]
    top = own.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(own, dtype=torch.bool).scatter(1, top, True)
