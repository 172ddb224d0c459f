"""Layer-wise mixtures of a group's model and the global model (FedALP)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def layer_weights(norms: Float[Tensor, " M L"], beta: float) -> Float[Tensor, " M L"]:
    """Return the weight of the group's own model in each layer.

    FedALP eq. 8: `Ψ_m = β·δ_m / max(δ_m)`

    Args:
        norms: δ [M, L], the norm of the group's mean update in each layer (eq. 7).
        beta: β in [0, 1].

    Returns:
        Ψ [M, L] float64 in [0, β]; zero for a group without any update (δ_m = 0).
    """
    largest = norms.double().amax(1, keepdim=True)
    return torch.where(largest > 0, beta * norms.double() / largest, torch.zeros((), dtype=torch.float64))


def mix_layer(
    own: Float[Tensor, " M *shape"], common: Float[Tensor, " *shape"], psi: Float[Tensor, " M"]
) -> Float[Tensor, " M *shape"]:
    """Mix one tensor of each group's model with the global model's.

    FedALP eq. 9: `W_new,m = Ψ_m·w_m + (1 − Ψ_m)·w_g`

    Args:
        own: w_m [M, *shape].
        common: w_g [*shape].
        psi: Ψ_m [M] of the tensor's layer.

    Returns:
        [M, *shape] in the dtype of `own`, computed in float64. The result is exact where Ψ is 0 or 1 or both inputs are
        equal.
    """
    weight = psi.double().reshape(-1, *[1] * common.dim())
    return torch.lerp(common.double().expand_as(own), own.double(), weight).to(own.dtype)
