"""Gradient descent inside a graph: gradients are added to the parameters without being stored."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from lightning_modules.lockstep.graphs import aten, can_run_at, example_value, remove_dead_code, root

ADDED_PRODUCTS = {aten.bmm.default: aten.baddbmm_.default, aten.mm.default: aten.addmm_.default}
"""Matrix products, and the operation that adds each to a matrix in place."""


def drop_zero_gradients(traced: GraphModule, count: int) -> list[int]:
    """Remove constants 0 from the first `count` results, the gradients, and return their indices."""
    results = _results(traced)
    zeros = [at for at, node in enumerate(results[:count]) if node.op == "get_attr" and not example_value(node).any()]
    traced.graph.output_node().args = ([node for at, node in enumerate(results) if at not in zeros],)
    return zeros


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
    remove_dead_code(graph)


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
