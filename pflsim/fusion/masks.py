"""Element-wise masks: their choice (FedSelect, FedCAC), means of what clients share, and how clients' masks overlap."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from pflsim.fusion.blocks import blocks
from pflsim.fusion.layerwise import flat_rows
from pflsim.fusion.means import uniform_mean
from pflsim.types import Tensors


def largest(values: Float[Tensor, " *shape"], count: int) -> Bool[Tensor, " *shape"]:
    """Return the mask of the `count` largest entries; of equal ones, the first."""
    mask = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
    mask[values.flatten().argsort(descending=True, stable=True)[:count]] = True
    return mask.view(values.shape)


def grown(
    private: Bool[Tensor, " *shape"], change: Float[Tensor, " *shape"], p: float, alpha: float
) -> Bool[Tensor, " *shape"]:
    """Return a mask with more private entries: of the shared ones, those that have changed most (FedSelect).

    Args:
        private: the mask, 1 where an entry is private.
        change: |Δ| ≥ 0 of each entry.
        p: the share of the shared entries that become private, rounded to a whole number.
        alpha: the largest share of private entries.
    """
    size, taken = private.numel(), int(private.sum())
    count = min(round(p * (size - taken)), int(alpha * size) - taken)
    return private | largest(change.masked_fill(private, -1.0), max(count, 0))


def sensitive(start: Float[Tensor, " *shape"], end: Float[Tensor, " *shape"], tau: float) -> Bool[Tensor, " *shape"]:
    """Return the mask of the ⌊τ·size⌋ entries with the largest |(end − start)·end| (FedCAC); none if all are 0."""
    sensitivity = ((end - start) * end).abs()
    return largest(sensitivity, int(tau * end.numel()) if sensitivity.any() else 0)


def mean_of_sharers(
    sent: Sequence[Float[Tensor, " _"]],
    private: Sequence[Bool[Tensor, " *shape"]],
    old: Float[Tensor, " *shape"],
) -> Float[Tensor, " *shape"]:
    """Return the uniform mean of each entry over the clients that share it (FedSelect); `old` where none does.

    Args:
        sent: the shared entries of each client's tensor, in order.
        private: the masks of the clients, 1 where an entry is not shared.
        old: the mean before.
    """
    if not any(mask.any() for mask in private):  # to the bit
        return uniform_mean([values.view(old.shape) for values in sent])
    total, count = (torch.zeros_like(old, dtype=torch.float64) for _ in range(2))
    for values, mask in zip(sent, private, strict=True):
        total[~mask] += values.double()
        count += ~mask
    return torch.where(count > 0, total / count, old.double()).to(old.dtype)


def overlaps(masks: Sequence[Tensors]) -> Float[Tensor, " K K"]:
    """Return how much the masks of K clients overlap: 1 − ‖M_i − M_j‖₁ / (‖M_i‖₁ + ‖M_j‖₁), float64; 0 if both are 0.

    Args:
        masks: of K clients, by tensor.
    """
    common = torch.zeros(len(masks), len(masks), dtype=torch.float64)
    for key in masks[0]:
        for block in blocks(flat_rows(masks, key)):
            common.addmm_(block, block.T)
    sizes = common.diagonal()
    return 2 * common / (sizes[:, None] + sizes).clamp(min=1)


def collaboration(overlap: Float[Tensor, " K K"], progress: float) -> Float[Tensor, " K K"]:
    """Return the weights of the means over each client's collaborators, itself and those that overlap enough (FedCAC).

    The threshold is Ō + progress·(O* − Ō), with the mean Ō and the largest O* of the overlaps of different clients.

    Returns:
        [K, K], receivers as rows.
    """
    own = torch.eye(len(overlap), dtype=torch.bool)
    members = own
    if len(overlap) > 1:
        mean, most = overlap[~own].mean(), overlap[~own].max()
        # the mean of equal overlaps may exceed them by rounding
        members = own | (overlap >= mean + progress * (most - mean) - 1e-12)
    return members / members.sum(1, keepdim=True).double()


def to_bits(mask: Bool[Tensor, " *shape"]) -> UInt8[Tensor, " bytes"]:
    """Pack a mask, eight entries per byte."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy()))


def from_bits(bits: UInt8[Tensor, " bytes"], shape: Sequence[int]) -> Bool[Tensor, " *shape"]:
    """Return the mask of this shape that `to_bits` packed."""
    found = np.unpackbits(bits.cpu().numpy(), count=math.prod(shape)).astype(bool)
    return torch.from_numpy(found).view(tuple(shape))
