"""Fuses clients' named tensors unit by unit (FedAMP, pFedCFR, pFedLA, FedALP)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from pflsim.fusion.attentive import attention_weights, mix, squared_distances
from pflsim.fusion.means import column
from pflsim.types import Tensors, Unit


def stack(uplink_weights: Sequence[Tensors], key: str) -> Shaped[Tensor, " N *shape"]:
    """Stack one named tensor of N clients.

    Args:
        uplink_weights: N clients' tensors by name.
        key: the name.

    Returns:
        [N, *shape], a copy.
    """
    return torch.stack(column(uplink_weights, key))


def flat_rows(weights: Sequence[Tensors], key: str) -> list[Shaped[Tensor, " P"]]:
    """Return one named tensor of N clients as N flat rows; views if contiguous."""
    return [tensor.reshape(-1) for tensor in column(weights, key)]


def mix_unit(weights: Sequence[Tensors], unit: Unit, zeta: Float[Tensor, " R N"]) -> list[dict[str, Tensor]]:
    """Mix one unit of N clients for R receivers; parameters and buffers use the same weights.

    pFedCFR eq 10, first line; pFedLA eq 4.

    Args:
        weights: N clients' tensors by name.
        unit: the fusion unit.
        zeta: [R, N], receivers as rows.

    Returns:
        The unit's tensors by name for each receiver. No two share memory, nor do they share it with an input.
    """
    received: list[dict[str, Tensor]] = [{} for _ in range(zeta.shape[0])]
    for key in unit.keys:
        for receiver, tensor in zip(received, mix(zeta, column(weights, key)), strict=True):
            receiver[key] = tensor
    return received


def collaborate(
    weights: Sequence[Tensors], units: Sequence[Unit], *, alpha: float, sigma: float
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Mix each client's units with the same units of all others.

    Args:
        weights: N mappings with the units' tensors.
        units: the units to mix; distances are computed per unit over its parameters.
        alpha: α ≥ 0 of the mixing weights ζ (pFedCFR eq. 10; FedAMP eq. 5), see `attention_weights`.
        sigma: σ > 0.

    Returns:
        N mixtures with the units' keys, and ζ [N, N] float64 by unit name, receivers as rows.
    """
    mixtures: list[dict[str, Tensor]] = [{} for _ in weights]
    zetas: dict[str, Tensor] = {}
    for unit in units:
        distances = torch.zeros(len(weights), len(weights), dtype=torch.float64)
        for key in unit.parameters:
            distances += squared_distances(flat_rows(weights, key))
        zetas[unit.name] = attention_weights(distances, alpha=alpha, sigma=sigma)
        for mixture, part in zip(mixtures, mix_unit(weights, unit, zetas[unit.name]), strict=True):
            mixture.update(part)
    return mixtures, zetas


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
