"""Reads rows of many clients in blocks of columns, which keeps the memory of products of many models small."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

Rows = Shaped[Tensor, " N P"] | Sequence[Shaped[Tensor, " P"]]
"""One flattened tensor of N clients: [N, P], or a list of N rows."""
COLUMNS = 4096
"""Columns per block: a float64 block of a hundred rows fits in a CPU's cache."""
GPU_COLUMNS = 2**17
"""Columns per block on a GPU, where few large copies are fast: 105 MB for a hundred rows."""
_gpu: ContextVar[torch.device | None] = ContextVar("gpu", default=None)


@contextmanager
def products_on(device: torch.device) -> Iterator[None]:
    """Compute distances, mixtures and their gradients on this device inside the block; results return to the rows'."""
    token = _gpu.set(device if device.type == "cuda" else None)
    try:
        yield
    finally:
        _gpu.reset(token)


def products_device(rows: Rows) -> torch.device:
    """Return the device on which products of these rows are computed: that of `products_on`, or their own."""
    return _gpu.get() or rows[0].device


def blocks(rows: Rows, device: torch.device | None = None) -> Iterator[Float64[Tensor, " N B"]]:
    """Read N rows in blocks of columns, from left to right.

    Args:
        rows: [N, P] or N rows.
        device: of the blocks; None: that of the rows.

    Yields:
        [N, B] in float64, where B is `COLUMNS` (`GPU_COLUMNS` on a GPU) or the rest. Each block overwrites the memory
        of the previous one, since allocating new memory can take as long as the products.
    """
    width, device = len(rows[0]), device or rows[0].device
    memory, columns = Workspace(len(rows), width, torch.float64, device), block_columns(device)
    for start in range(0, width, columns):
        block = memory.columns(min(columns, width - start))
        for target, row in zip(block, rows, strict=True):
            target.copy_(row[start : start + columns].to(device))
        yield block


def block_columns(device: torch.device) -> int:
    """Return the number of columns of a block on a device."""
    return GPU_COLUMNS if device.type == "cuda" else COLUMNS


class Workspace:
    """Reusable memory for blocks of columns.

    Args:
        rows: rows of a block.
        width: maximum number of columns.
        dtype, device: of a block.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device):
        self._rows = rows
        self._memory = torch.empty(rows * min(block_columns(device), width), dtype=dtype, device=device)

    def columns(self, width: int) -> Tensor:
        """Return a contiguous tensor [rows, width] in the same memory at each call."""
        return self._memory[: self._rows * width].view(self._rows, width)
