"""Counts the floating-point operations of a training step and of a forward pass."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode


def step_flops(net: nn.Module, input_shape: tuple[int, ...], batch: int) -> int:
    """Return the operations of one training step: matrix products and convolutions, forward and backward."""
    inputs, labels = torch.rand(batch, *input_shape), torch.zeros(batch, dtype=torch.long)
    net.train()
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(net(inputs), labels).backward()
    net.zero_grad(set_to_none=True)
    return counter.get_total_flops()


def forward_flops(net: nn.Module, input_shape: tuple[int, ...], batch: int) -> int:
    """Return the operations of one forward pass."""
    net.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(torch.rand(batch, *input_shape))
    return counter.get_total_flops()
