"""Compilation of a traced training step, with gradient descent inside the graph."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from lightning_modules.lockstep import graphs
from lightning_modules.lockstep.graphs import aten, can_run_at, example_value, root
from lightning_modules.lockstep.program import Program

ADDED_PRODUCTS = {aten.bmm.default: aten.baddbmm_.default, aten.mm.default: aten.addmm_.default}
"""Matrix products, and the operation that adds each to a matrix in place."""


def compile_step(
    traced: GraphModule, trained: Sequence[int], state: int, descend: bool, objective: str = "objective"
) -> Program:
    """Compile the trace of a training step into a function that is called once per mini-batch.

    Passes over the graph, in order: remove operations without effect and compute constants once (`graphs.simplify`),
    copy results that are views of inputs, with `descend` add the gradients to the parameters in place
    (`descend_in_place`), and add biases within matrix products. The result runs as generated Python code
    (`program.Program`).

    Assumes, and does not check:

    - The graph is a flat list of ATen operations from `recorder.record`, traced with inputs that are all zero.
    - Shapes, dtypes, strides and devices of all inputs are those of the trace.
    - The state tensors stay at their addresses between calls; the step may write to them.
    - Control flow of the objective does not depend on values of tensors; a trace follows one branch only.

    Args:
        traced: its inputs are the state, then inputs and labels; its results are the gradients, then the loss terms.
            Changed in place.
        trained: for each gradient, the index of its parameter in the state.
        state: number of state tensors: parameters and buffers.
        descend: take the step p ← p − lr·gradient inside the graph, with lr as a new last input; otherwise the
            gradients are results.
        objective: name of the traced objective, for the error.

    Raises:
        ValueError: the shape or the result of an operation depends on values of tensors.
    """
    _refuse_data_dependence(traced, objective)
    graphs.simplify(traced)
    copy_inputs(traced)
    if descend:
        descend_in_place(traced, trained)
    graphs.fuse_biases(traced.graph)
    graphs.remove_dead_code(traced.graph)
    return Program(traced, state)


def _refuse_data_dependence(traced: GraphModule, objective: str) -> None:
    """Raise ValueError if an operation's shape or result depends on values, which are all zero during the trace."""
    for node in traced.graph.nodes:
        tags = getattr(node.target, "tags", ())
        dependent = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        if node.target is torch.ops.aten.index.Tensor:  # integer indices have a fixed shape, masks do not
            dependent = any(part is not None and example_value(part).dtype == torch.bool for part in node.args[1])
        if dependent:
            reason = f"the shape of {node.target}'s result depends on values of tensors"
            raise ValueError(
                f"{objective} cannot be traced: {reason}; set lockstep=false, or lockstep = False in the class"
            )


def copy_inputs(traced: GraphModule) -> None:
    """Copy the results that are inputs or views of inputs, so that the step does not change them."""
    output, results = traced.graph.output_node(), _results(traced)
    with traced.graph.inserting_before(output):
        for at, result in enumerate(results):
            if root(result).op == "placeholder":
                results[at] = traced.graph.call_function(aten.clone.default, (result,))
                results[at].meta["val"] = example_value(result)
    output.args = (results,)


def descend_in_place(traced: GraphModule, trained: Sequence[int]) -> None:
    """Replace gradients by updates p ← p − lr·gradient; lr becomes a new last input.

    Args:
        traced: its first results are the gradients of the inputs `trained`. Changed in place.
        trained: indices of the inputs p.
    """
    graph, results = traced.graph, _results(traced)
    inputs, output = [node for node in graph.nodes if node.op == "placeholder"], graph.output_node()
    with graph.inserting_after(inputs[-1]):
        lr = graph.placeholder("lr")
    parameters = {inputs[at] for at in trained}
    with graph.inserting_before(output):
        rate = graph.call_function(operator.neg, (lr,))
        for at, gradient in zip(trained, results, strict=False):
            _add(graph, inputs[at], gradient, rate, output, parameters)
    output.args = (results[len(trained) :],)


def _add(graph: Graph, parameter: Node, gradient: Node, rate: Node, user: Node, parameters: set[Node]) -> None:
    """Add rate·gradient to a parameter.

    A sum is added term by term, and a matrix product without storing it, if only `user` needs it and it does not depend
    on any of `parameters`, which this step changes.
    """
    only_use, shape, terms = set(gradient.users) == {user}, example_value(parameter).shape, gradient.args[:2]
    splits = only_use and not gradient.kwargs and not any(isinstance(t, Node) and root(t) in parameters for t in terms)
    product: Any = ADDED_PRODUCTS.get(gradient.target) if splits else None  # type: ignore[call-overload]
    summed = splits and gradient.target is aten.add.Tensor and _two_tensors(terms, shape)
    if (summed or product is not None) and not can_run_at(gradient, graph.output_node()):
        product, summed = None, False
    if product is not None:
        graph.call_function(product, (parameter, *terms), {"alpha": rate})
    elif summed:
        for term in terms:
            _add(graph, parameter, term, rate, gradient, parameters)  # type: ignore[arg-type]
    else:
        graph.call_function(aten.add_.Tensor, (parameter, gradient), {"alpha": rate})


def _results(traced: GraphModule) -> list[Node]:
    return list(traced.graph.output_node().args[0])  # type: ignore[arg-type]


def _two_tensors(terms: Sequence[Any], shape: torch.Size) -> bool:
    return terms[0] is not terms[1] and all(isinstance(t, Node) and example_value(t).shape == shape for t in terms)
