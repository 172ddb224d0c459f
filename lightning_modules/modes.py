"""Switching modules to evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode inside the block; its former mode is restored afterwards."""
    before = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(before)
