"""Fuses clients' named tensors unit by unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from pflsim.fusion.attentive import mix
from pflsim.types import Tensors, Unit


def column(weights: Sequence[Tensors], key: str) -> list[Tensor]:
    """Return the tensors of one name, one per client, without copying.

    Raises:
        ValueError: a client lacks the tensor or has another shape; states the position.
    """
    missing = [n for n, tensors in enumerate(weights) if key not in tensors]
    if missing:
        raise ValueError(f"{key}: not among the weights of the clients at positions {missing}")
    found = [tensors[key] for tensors in weights]
    for n, tensor in enumerate(found):
        if tensor.shape != found[0].shape:
            shapes = f"shape {tuple(tensor.shape)} at position {n}, {tuple(found[0].shape)} at position 0"
            raise ValueError(f"{key}: {shapes}; only equal shapes can be fused")
    return found


def stack(uplink_weights: Sequence[Tensors], key: str) -> Shaped[Tensor, " N *shape"]:
    """Stack one named tensor of N clients.

    Args:
        uplink_weights: N clients' tensors by name.
        key: the name.

    Returns:
        [N, *shape], a copy.

    Raises:
        ValueError: a client lacks the tensor or has another shape; states the position.
    """
    return torch.stack(column(uplink_weights, key))


def flat_rows(weights: Sequence[Tensors], key: str) -> list[Shaped[Tensor, " P"]]:
    """Return one named tensor of N clients as N flat rows; views if contiguous.

    Raises:
        ValueError: a client lacks the tensor or has another shape.
    """
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

    Raises:
        ValueError: a client lacks a tensor or has another shape.
    """
    received: list[dict[str, Tensor]] = [{} for _ in range(zeta.shape[0])]
    for key in unit.keys:
        for receiver, tensor in zip(received, mix(zeta, column(weights, key)), strict=True):
            receiver[key] = tensor
    return received
