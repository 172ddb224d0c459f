"""Gradient descent inside a graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_modules.lockstep.compiler import copy_inputs, descend_in_place
from lightning_modules.lockstep.graphs import simplify
from lightning_modules.lockstep.program import Program


def test_a_gradient_that_is_another_parameter_is_its_value_before_the_step() -> None:
    def gradients(a: Tensor, b: Tensor, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        return [b.detach(), a.t().detach()]

    a, b = torch.full((2, 2), 1.0), torch.full((2, 2), 2.0)
    traced = make_fx(gradients)(a, b, torch.zeros(1), torch.zeros(1))
    simplify(traced)
    copy_inputs(traced)
    descend_in_place(traced, [0, 1])
    step = Program(traced, 2).bind([a, b])
    assert step(torch.zeros(1), torch.zeros(1), 0.5) == []
    assert a.tolist() == [[0.0, 0.0], [0.0, 0.0]] and b.tolist() == [[1.5, 1.5], [1.5, 1.5]]
