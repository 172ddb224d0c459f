"""A step of gradient descent inside a graph: gradients go into the parameters without being stored."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from lightning_modules.lockstep.graphs import aten, clear, example, postponable, root

PRODUCTS = {aten.bmm.default: aten.baddbmm_.default, aten.mm.default: aten.addmm_.default}
"""Matrix products, and how they are added to a matrix."""


def leave_out_zeros(traced: GraphModule, count: int) -> list[int]:
    """Take constants of 0 out of the first `count` results: gradients of what the objective does not touch."""
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    results = list(output.args[0])
    zeros = [at for at, node in enumerate(results[:count]) if node.op == "get_attr" and not example(node).any()]
    output.args = ([node for at, node in enumerate(results) if at not in zeros],)
    return zeros


def copy_inputs(traced: GraphModule) -> None:
    """Copy those results that are inputs or views of inputs: they are meant as they are before the step."""
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    results = list(output.args[0])
    with traced.graph.inserting_before(output):
        for at, found in enumerate(results):
            if root(found).op == "placeholder":
                results[at] = traced.graph.call_function(aten.clone.default, (found,))
                results[at].meta["val"] = example(found)
    output.args = (results,)


def descend_in_place(traced: GraphModule, moved: Sequence[int]) -> None:
    """Turn the first results, gradients of the inputs `moved`, into p ← p − lr·gradient; lr is a new last input."""
    graph = traced.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    with graph.inserting_after(inputs[-1]):
        lr = graph.placeholder("lr")
    moving = {inputs[at] for at in moved}
    with graph.inserting_before(output):
        rate = graph.call_function(operator.neg, (lr,))
        for at, gradient in zip(moved, results, strict=False):
            _add(graph, inputs[at], gradient, rate, output, moving)
    output.args = (results[len(moved) :],)
    clear(graph)


def _add(graph: Graph, parameter: Node, gradient: Node, rate: Node, user: Node, moving: set[Node]) -> None:
    """Add rate·gradient: a sum term by term, a matrix product without storing it, where only `user` needs it and it is
    not made of what is `moving`.
    """
    alone, shape, terms = set(gradient.users) == {user}, example(parameter).shape, gradient.args[:2]
    apart = alone and not gradient.kwargs and not any(isinstance(t, Node) and root(t) in moving for t in terms)
    product: Any = PRODUCTS.get(gradient.target) if apart else None  # type: ignore[call-overload]
    summed = apart and gradient.target is aten.add.Tensor and _both(terms, shape)
    if (summed or product is not None) and not postponable(gradient, graph.output_node()):
        product, summed = None, False
    if product is not None:
        graph.call_function(product, (parameter, *terms), {"alpha": rate})
    elif summed:
        for term in terms:
            _add(graph, parameter, term, rate, gradient, moving)  # type: ignore[arg-type]
    else:
        graph.call_function(aten.add_.Tensor, (parameter, gradient), {"alpha": rate})


def _both(terms: Sequence[Any], shape: torch.Size) -> bool:
    return terms[0] is not terms[1] and all(isinstance(t, Node) and example(t).shape == shape for t in terms)
