"""Attentive mixing of all clients, unit by unit (FedAMP and pFedCFR)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pflsim.fusion.attentive import attention_weights, squared_distances
from pflsim.fusion.layerwise import flat_rows, mix_unit
from pflsim.types import Tensors, Unit


@dataclass(frozen=True, slots=True)
class Attention:
    """Settings of the mixing weights ζ (pFedCFR eq. 10; FedAMP eq. 5).

    Args:
        alpha: α > 0.
        sigma: σ > 0 of A(x) = 1 − e^{−x/σ}.
        clamp: set negative self weights to 0 and renormalise the rows instead of raising an error.
    """

    alpha: float
    sigma: float
    clamp: bool = False


def collaborate(
    weights: Sequence[Tensors], units: Sequence[Unit], attention: Attention
) -> tuple[list[dict[str, Tensor]], Mapping[str, Tensor]]:
    """Mix each client's units with the same units of all others.

    Args:
        weights: N mappings with the units' tensors.
        units: the units to mix; distances are computed per unit over its parameters.
        attention: settings of the mixing weights.

    Returns:
        N mixtures with the units' keys, and ζ [N, N] float64 by unit name, receivers as rows.
    """
    mixtures: list[dict[str, Tensor]] = [{} for _ in weights]
    zetas: dict[str, Tensor] = {}
    for unit in units:
        distances = torch.zeros(len(weights), len(weights), dtype=torch.float64)
        for key in unit.parameters:
            distances += squared_distances(flat_rows(weights, key))
        zetas[unit.name] = attention_weights(
            distances, alpha=attention.alpha, sigma=attention.sigma, clamp=attention.clamp
        )
        for mixture, part in zip(mixtures, mix_unit(weights, unit, zetas[unit.name]), strict=True):
            mixture.update(part)
    return mixtures, zetas
