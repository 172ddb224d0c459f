"""Fusion unit by unit: from the clients' named tensors to stacks and back, one unit in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from pflsim.fusion.attentive import mix
from pflsim.types import Tensors, Unit


def stack(uplink_weights: Sequence[Tensors], key: str) -> Shaped[Tensor, " N *shape"]:
    """Stack one named tensor of N clients, in the order given.

    Args:
        uplink_weights: N clients' tensors by name.
        key: the name.

    Returns:
        [N, *shape], a copy.

    Raises:
        ValueError: a client lacks the tensor, or has it in another shape than the first one; says which (by position).
    """
    return torch.stack(_column(uplink_weights, key))


def flatten_unit(weights: Sequence[Tensors], unit: Unit) -> Float[Tensor, " N P"]:
    """Flatten one unit of N clients to a row each, for distances.

    Args:
        weights: N clients' tensors by name.
        unit: the fusion unit; its parameters count, its buffers do not.

    Returns:
        [N, P], P being the number of parameters in the unit.

    Raises:
        ValueError: a client lacks a tensor or has it in another shape.
    """
    columns = [_column(weights, key) for key in unit.parameters]
    sizes = [column[0].numel() for column in columns]
    dtype = reduce(torch.promote_types, [column[0].dtype for column in columns])
    flat = torch.empty(len(weights), sum(sizes), dtype=dtype, device=columns[0][0].device)
    for column, place in zip(columns, flat.split(sizes, dim=1), strict=True):
        for tensor, row in zip(column, place, strict=True):
            row.copy_(tensor.reshape(-1))
    return flat


def mix_unit(weights: Sequence[Tensors], unit: Unit, zeta: Float[Tensor, " R N"]) -> list[dict[str, Tensor]]:
    """Mix one unit of N clients for R receivers: parameters and buffers with the same weights.

    pFedCFR eq 10, first line; pFedLA eq 4.

    Args:
        weights: N clients' tensors by name.
        unit: the fusion unit.
        zeta: [R, N], row: the receiver.

    Returns:
        For each of the R receivers the unit's tensors by name; none of them shares memory with another or an input.

    Raises:
        ValueError: a client lacks a tensor or has it in another shape.
    """
    received: list[dict[str, Tensor]] = [{} for _ in range(zeta.shape[0])]
    for key in unit.keys:
        for receiver, tensor in zip(received, mix(zeta, stack(weights, key)), strict=True):
            receiver[key] = tensor.clone()
    return received


def _column(weights: Sequence[Tensors], key: str) -> list[Tensor]:
    """The tensors of one name, one per client, all of the same shape."""
    missing = [n for n, tensors in enumerate(weights) if key not in tensors]
    if missing:
        raise ValueError(f"{key}: not among the weights of the clients at positions {missing}")
    column = [tensors[key] for tensors in weights]
    for n, tensor in enumerate(column):
        if tensor.shape != column[0].shape:
            shapes = f"shape {tuple(tensor.shape)} at position {n}, {tuple(column[0].shape)} at position 0"
            raise ValueError(f"{key}: {shapes}; only equal shapes can be fused")
    return column
