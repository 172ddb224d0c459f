"""Layers between a group's model and the common one (FedALP)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def layer_weights(norms: Float[Tensor, " M L"], beta: float) -> Float[Tensor, " M L"]:
    """How personal each layer of each group is.

    FedALP eq. 8: `Ψ_m = β·δ_m / max(δ_m)`

    Args:
        norms: δ [M, L], the length of the group's mean update in each layer (eq. 7).
        beta: β in [0, 1].

    Returns:
        Ψ [M, L] float64 in [0, β]; a group that has not moved at all (δ_m = 0) has Ψ_m = 0.
    """
    largest = norms.double().amax(1, keepdim=True)
    return torch.where(largest > 0, beta * norms.double() / largest, torch.zeros((), dtype=torch.float64))


def mix_layer(
    own: Float[Tensor, " M *shape"], common: Float[Tensor, " *shape"], psi: Float[Tensor, " M"]
) -> Float[Tensor, " M *shape"]:
    """Mix one tensor of every group's model with the common model's.

    FedALP eq. 9: `W_new,m = Ψ_m·w_m + (1 − Ψ_m)·w_g`

    Args:
        own: w_m [M, *shape].
        common: w_g [*shape].
        psi: Ψ_m [M] of the layer that the tensor belongs to.

    Returns:
        [M, *shape] in the dtype of `own`, computed in float64. Ψ = 0 gives w_g and Ψ = 1 gives w_m to the bit, and so
        does any Ψ where the two are equal.
    """
    weight = psi.double().reshape(-1, *[1] * common.dim())
    return torch.lerp(common.double().expand_as(own), own.double(), weight).to(own.dtype)
