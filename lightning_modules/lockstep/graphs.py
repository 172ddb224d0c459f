"""Simplification of traced graphs of tensor operations."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

aten = torch.ops.aten
RESHAPES = (aten.expand.default, aten.view.default, aten._unsafe_view.default)
ALIASES = (aten.alias.default, aten.detach.default)
FILLS = {aten.ones_like.default: 1, aten.zeros_like.default: 0, aten.new_zeros.default: 0}
"""Operations that fill their result with one number."""
UNDECLARED_VIEWS = (
    operator.getitem,
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
)
"""Operations that return a view of their argument although their schema does not declare it."""
BATCH_NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)
"""Operations that change running statistics, arguments 3 and 4, although their schema does not declare it."""


def simplify(traced: GraphModule) -> None:
    """Remove operations without effect, and compute once what does not depend on any input.

    Args:
        traced: changed in place.
    """
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = getattr(traced, node.target)
    mutated = _mutated(traced.graph)
    for node in list(traced.graph.nodes):
        equal = _equal_input(node, mutated)
        if equal is not None:
            node.replace_all_uses_with(equal)
            traced.graph.erase_node(node)
    _transpose_products(traced.graph)
    _fold_constants(traced, mutated)
    remove_dead_code(traced.graph)


def remove_dead_code(graph: Graph) -> None:
    """Remove operations whose results are not used."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or node.target in BATCH_NORMS)
    graph.lint()


def aliased_input(node: Node) -> Node | None:
    """Return the argument whose memory a node's result uses: of a view, an in-place operation or a tuple item."""
    if node.op != "call_function":
        return None
    if node.target in UNDECLARED_VIEWS:
        return node.all_input_nodes[0]
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        memory = {name for result in schema.returns if result.alias_info for name in result.alias_info.before_set}
        returns_list = any(isinstance(result.type, torch.ListType) for result in schema.returns)
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if (alias := argument.alias_info) is None or not isinstance(value, Node):
                continue
            if alias.before_set & memory or (returns_list and "*" in alias.after_set):  # lists of views: (a -> *)
                return value
    return None


def root(node: Node) -> Node:
    """Return the node that allocated the memory of a node's result."""
    while (source := aliased_input(node)) is not None:
        node = source
    return node


def _mutated(graph: Graph) -> set[Node]:
    """Return the nodes whose memory any operation writes to."""
    roots = {mutated for node in graph.nodes for mutated in _mutated_roots(node)}
    return {node for node in graph.nodes if root(node) in roots}


def _mutated_roots(node: Node) -> set[Node]:
    """Return the roots of the memory that an operation writes to."""
    written = list(node.args[3:5]) if node.target in BATCH_NORMS else []
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(value)
    return {root(value) for value in written if isinstance(value, Node)}


def can_run_at(node: Node, until: Node) -> bool:
    """Return whether a node has the same value just before `until`: no node in between writes to its inputs."""
    inputs, at = {root(source) for source in node.all_input_nodes}, node.next
    while at is not until:
        if _mutated_roots(at) & inputs:
            return False
        at = at.next
    return True


def _equal_input(node: Node, mutated: set[Node]) -> Node | None:
    """Return the earlier node that always has the same value, or None."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    source, value = node.args[0], node.meta.get("val")
    if not isinstance(value, Tensor) or "val" not in source.meta:
        return None
    if node.target in ALIASES or (node.target in RESHAPES and example_value(source).shape == value.shape):
        return source
    if node.target is aten.permute.default and [d % value.dim() for d in _ints(node.args[1])] == [*range(value.dim())]:
        return source
    if node.target is aten.t.default and source.target is aten.t.default:
        return source.all_input_nodes[0]
    if node.target is aten.transpose.int and source.target is aten.transpose.int:
        here, there = ({d % value.dim() for d in _ints(n.args[1:3])} for n in (node, source))
        return source.args[0] if here == there and isinstance(source.args[0], Node) else None
    if node.target in (aten.mul.Scalar, aten.pow.Tensor_Scalar) and node.args[1] == 1:
        return source if example_value(source).dtype == value.dtype and not {node, source} & mutated else None
    return None


def _fold_constants(traced: GraphModule, mutated: set[Node]) -> None:
    """Replace nodes that do not depend on any input by their value."""
    known: dict[Node, Tensor] = {}
    for node in list(traced.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or node in mutated:
            continue
        value = node.meta.get("val")
        if torch.Tag.nondeterministic_seeded in node.target.tags or not isinstance(value, Tensor):
            continue
        if node.target in FILLS:
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=node.meta["device"])
            known[node] = like.fill_(FILLS[node.target])
        elif all(n in known for n in node.all_input_nodes):
            arguments, named = map_arg((node.args, node.kwargs), lambda n: known[n])  # type: ignore[misc,return-value]
            known[node] = node.target(*arguments, **named)
    for number, (node, value) in enumerate(known.items()):
        if all(user in known for user in node.users):
            continue
        name = f"constant{number}"
        traced.register_buffer(name, value, persistent=False)
        with traced.graph.inserting_before(node):
            constant = traced.graph.get_attr(name)
        constant.meta["val"] = value
        node.replace_all_uses_with(constant)


def _transpose_products(graph: Graph) -> None:
    """Replace (AB)ᵀ by BᵀAᵀ, whose result has the strides of the parameter that it is the gradient of."""
    for node in graph.nodes:
        if node.target is aten.transpose.int and {d % 3 for d in _ints(node.args[1:])} == {1, 2}:
            product = node.args[0]
            if product.target is aten.bmm.default and set(product.users) == {node}:
                with graph.inserting_before(product):
                    factors = [_transposed(graph, factor) for factor in reversed(product.args)]
                    swapped = graph.call_function(aten.bmm.default, tuple(factors))
                swapped.meta |= {**node.meta, "val": example_value(node).contiguous()}
                node.replace_all_uses_with(swapped)


def _transposed(graph: Graph, node: Node) -> Node:
    """Return a node for the transposes of matrices [n, a, b]."""
    if node.target is aten.transpose.int and {d % 3 for d in _ints(node.args[1:])} == {1, 2}:
        return node.all_input_nodes[0]
    swapped = graph.call_function(aten.transpose.int, (node, 1, 2))
    swapped.meta |= {**node.meta, "val": example_value(node).transpose(1, 2)}
    return swapped


def fuse_biases(graph: Graph) -> None:
    """Replace a batched matrix product and the addition of its bias by one operation."""
    for node in graph.nodes:
        if node.target is aten.add.Tensor and not node.kwargs:
            added, product = node.args
            if isinstance(added, Node) and isinstance(product, Node) and set(product.users) == {node}:
                result = example_value(node)
                values = example_value(product), example_value(added)
                alike = values[0].shape == result.shape and all(value.dtype == result.dtype for value in values)
                if product.target is aten.bmm.default and alike and can_run_at(product, node):
                    node.target, node.args = aten.baddbmm.default, (added, *product.args)


def example_value(node: Node) -> Tensor:
    """Return the value of a node in the trace; its shape, strides and dtype are those of every call."""
    return node.meta["val"]


def _ints(arguments: Any) -> list[int]:
    return [int(a) for a in arguments]
