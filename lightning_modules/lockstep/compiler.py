"""Compilation of a traced training step."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from lightning_modules.lockstep.graphs import example_value, simplify
from lightning_modules.lockstep.program import FxProgram, Program
from lightning_modules.lockstep.updates import copy_inputs, descend_in_place, drop_zero_gradients

USE_FX = False
"""Run compiled steps by torch.fx instead of generated Python code. Slower, with the same results: set it to find out
whether the generated code is the cause of a wrong result."""


def compile_step(
    traced: GraphModule, trainable: int, state: int, descend: bool, objective: str = "objective"
) -> tuple[Program | FxProgram, list[int]]:
    """Compile the trace of a training step into a function that is called once per mini-batch.

    Passes over the graph, in order: remove operations without effect and compute constants once (`graphs.simplify`),
    drop gradients that are always zero, copy results that are views of inputs, and, with `descend`, add the gradients
    to the parameters in place (`updates.descend_in_place`). The result runs as generated Python code
    (`program.Program`), or by torch.fx if `USE_FX` is set.

    Assumes, and does not check:

    - The graph is a flat list of ATen operations from `make_fx`, traced with inputs that are all zero.
    - Shapes, dtypes, strides and devices of all inputs are those of the trace.
    - The state tensors stay at their addresses between calls; the step may write to them.
    - Control flow of the objective does not depend on values of tensors; a trace follows one branch only.

    Args:
        traced: its inputs are the state (the trainable parameters first), then inputs and labels; its results are one
            gradient per trainable parameter, then the loss terms. Changed in place.
        trainable: number of trainable parameters.
        state: number of state tensors: parameters and buffers.
        descend: take the step p ← p − lr·gradient inside the graph, with lr as a new last input; otherwise the
            gradients are results.
        objective: name of the traced objective, for the error.

    Returns:
        The program, and the indices of trainable parameters that the objective does not touch; their gradients are not
        among the results.

    Raises:
        ValueError: the shape or the result of an operation depends on values of tensors.
    """
    _refuse_data_dependence(traced, objective)
    simplify(traced)
    untouched = drop_zero_gradients(traced, trainable)
    copy_inputs(traced)
    if descend:
        descend_in_place(traced, [at for at in range(trainable) if at not in untouched])
    return (FxProgram if USE_FX else Program)(traced, state), untouched


def _refuse_data_dependence(traced: GraphModule, objective: str) -> None:
    """Raise ValueError if an operation's shape or result depends on values, which are all zero during the trace."""
    for node in traced.graph.nodes:
        tags = getattr(node.target, "tags", ())
        dependent = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        if node.target is torch.ops.aten.index.Tensor:  # integer indices have a fixed shape, masks do not
            dependent = any(part is not None and example_value(part).dtype == torch.bool for part in node.args[1])
        if dependent:
            raise ValueError(
                f"{objective} cannot be traced: the shape of {node.target}'s result depends on values of tensors; set "
                "lockstep=false for the run, or lockstep = False in the method's class"
            )
