"""A part of a module in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """A part in evaluation mode inside the block."""
    before = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(before)
