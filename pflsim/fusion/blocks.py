"""Rows of many clients, a block of columns at a time: what keeps products of a hundred models out of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

COLUMNS = 4096
"""Columns handled at a time: a float64 block of a hundred rows stays within a processor's cache."""


def blocks(rows: Float[Tensor, " N P"] | Sequence[Float[Tensor, " P"]]) -> Iterator[Float64[Tensor, " N B"]]:
    """Read N rows from left to right.

    Args:
        rows: N, each with P columns; a list of tensors need not be stacked.

    Yields:
        [N, B] in float64, B being `COLUMNS` or what is left. It is the same memory every time, overwritten by the next
        block: to give it back to the system and to ask for it anew can take as long as the products.
    """
    width = len(rows[0])
    memory = Workspace(len(rows), width, torch.float64, rows[0].device)
    for start in range(0, width, COLUMNS):
        block = memory.columns(min(COLUMNS, width - start))
        for place, row in zip(block, rows, strict=True):
            place.copy_(row[start : start + COLUMNS])
        yield block


class Workspace:
    """Memory for blocks of at most `COLUMNS` columns.

    Args:
        rows: of a block.
        width: the most columns that there can be.
        dtype, device: of a block.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device):
        self._rows = rows
        self._memory = torch.empty(rows * min(COLUMNS, width), dtype=dtype, device=device)

    def columns(self, width: int) -> Tensor:
        """A contiguous [rows, width]; the same memory at every call."""
        return self._memory[: self._rows * width].view(self._rows, width)
