"""Fusion of low-rank adapters B·A whose ranks differ between clients."""

from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

Factors = tuple[Float64[Tensor, "_ I"], Float64[Tensor, "O _"]]
"""A [r, I] and B [O, r] of a layer's adapter, with any rank r."""
ZERO = 1e-12
"""A singular value below this share of the largest one is 0: its vectors are rounding errors."""


def rank_axis(name: str) -> int | None:
    """Return the axis of the rank in a weight of PEFT's LoRA adapters: 0 in A, 1 in B; None for other tensors."""
    *parts, last = name.split(".")
    return next((axis for axis, part in enumerate(("lora_A", "lora_B")) if part in parts and last == "weight"), None)


def product_norm(layers: Sequence[tuple[Float64[Tensor, "_ _"], Float64[Tensor, "_ _"]]]) -> float:
    """Return the Frobenius norm of B·A over all layers of a client, by ‖BA‖² = tr(BᵀB·AAᵀ)."""
    return float(sum(((b.T @ b) * (a @ a.T)).sum().clamp_min(0) for a, b in layers)) ** 0.5


def padded_mean(factors: Sequence[Factors], shares: Float64[Tensor, " K"], known: Factors) -> Factors:
    """Return Σ_k p_k·A_k and Σ_k p_k·B_k, padded with zeros to the largest rank (HetLoRA, Cho et al. 2024).

    Args:
        factors: of K clients.
        shares: p, with sum 1.
        known: of the largest rank. Rows of A and columns of B that no client has keep these values.
    """
    a, b = known[0].clone(), known[1].clone()
    most = max(len(own) for own, _ in factors)
    a[:most], b[:, :most] = 0, 0
    for (own_a, own_b), share in zip(factors, shares.tolist(), strict=True):
        a[: len(own_a)] += share * own_a
        b[:, : len(own_a)] += share * own_b
    return a, b


def decomposed_mean(factors: Sequence[Factors], shares: Float64[Tensor, " K"], known: Factors) -> Factors:
    """Return A = Vᵀ and B = UΣ of the largest singular values of Σ_k w_k·B_kA_k (FlexLoRA, Bai et al. 2024).

    The entry of each row of Vᵀ with the largest absolute value is positive. Where singular values are 0, relative to
    the largest one, rows of A keep their values and columns of B are 0. If all are 0, both matrices keep theirs.

    Args:
        factors: of K clients.
        shares: w, with sum 1.
        known: of the largest rank.
    """
    # the sum is [w_1·B_1, ...]·[A_1; ...]: after QR of both, the SVD is of the sum of the ranks instead of the layer's
    left, upper = torch.linalg.qr(torch.cat([share * b for (_, b), share in zip(factors, shares, strict=True)], 1))
    right, lower = torch.linalg.qr(torch.cat([a for a, _ in factors]).T)
    u, values, vt = torch.linalg.svd(upper @ lower.T, full_matrices=False)
    if not values.any():
        return known
    a, b = known[0].clone(), torch.zeros_like(known[1])
    rank = min(len(a), int((values > ZERO * values[0]).sum()))
    u, vt = left @ u[:, :rank] * values[:rank], vt[:rank] @ right.T
    signs = vt.gather(1, vt.abs().argmax(1, keepdim=True)).sign()
    a[:rank], b[:, :rank] = signs * vt, u * signs.T
    return a, b
