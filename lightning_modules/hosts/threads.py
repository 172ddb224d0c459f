"""The number of threads of a computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

ELEMENTWISE = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2"),
    *("sin", "sinh", "sqrt", "tan", "tanh"),
)
"""Functions that torch may compute with MKL's vector library."""


@cache
def _call_once() -> None:
    """Call each function of MKL's vector library on one thread.

    Where several threads make the first call, one of them may use a less exact kernel (pytorch/pytorch#188792).
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in ELEMENTWISE:
            getattr(torch, name)(one)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Set the number of torch's threads inside the block; the last bits of results depend on it."""
    if threads > 1:
        _call_once()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
