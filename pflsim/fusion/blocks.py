"""Reads rows of many clients in blocks of columns, which keeps the memory of products of many models small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

COLUMNS = 4096
"""Columns per block: a float64 block of a hundred rows fits in a CPU's cache."""


def blocks(rows: Float[Tensor, " N P"] | Sequence[Float[Tensor, " P"]]) -> Iterator[Float64[Tensor, " N B"]]:
    """Read N rows in blocks of columns, from left to right.

    Args:
        rows: [N, P] or N rows.

    Yields:
        [N, B] in float64, where B is `COLUMNS` or the rest. Each block overwrites the memory of the previous one, since
        allocating new memory can take as long as the products.
    """
    width = len(rows[0])
    memory = Workspace(len(rows), width, torch.float64, rows[0].device)
    for start in range(0, width, COLUMNS):
        block = memory.columns(min(COLUMNS, width - start))
        for target, row in zip(block, rows, strict=True):
            target.copy_(row[start : start + COLUMNS])
        yield block


class Workspace:
    """Reusable memory for blocks of at most `COLUMNS` columns.

    Args:
        rows: rows of a block.
        width: maximum number of columns.
        dtype, device: of a block.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device):
        self._rows = rows
        self._memory = torch.empty(rows * min(COLUMNS, width), dtype=dtype, device=device)

    def columns(self, width: int) -> Tensor:
        """Return a contiguous tensor [rows, width] in the same memory at each call."""
        return self._memory[: self._rows * width].view(self._rows, width)
