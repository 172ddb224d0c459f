"""Floating-point operations of training and evaluating, counted on one step."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode


def step_flops(net: nn.Module, input_shape: tuple[int, ...], batch: int) -> int:
    """Of the products and convolutions of one training step: forward, and backward to all parameters."""
    inputs, labels = torch.rand(batch, *input_shape), torch.zeros(batch, dtype=torch.long)
    net.train()
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(net(inputs), labels).backward()
    net.zero_grad(set_to_none=True)
    return counter.get_total_flops()


def forward_flops(net: nn.Module, input_shape: tuple[int, ...], batch: int) -> int:
    """Of one forward pass."""
    net.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(torch.rand(batch, *input_shape))
    return counter.get_total_flops()
