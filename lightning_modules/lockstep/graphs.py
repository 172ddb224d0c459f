"""Traces of tensor operations made short: what does nothing goes, what is always the same is worked out once."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg

aten = torch.ops.aten
SHAPED = (aten.expand.default, aten.view.default, aten._unsafe_view.default)
ALIASES = (aten.alias.default, aten.detach.default)
FILLED = {
    aten.ones_like.default: 1,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
}
"""Operations whose result is filled with one number."""
UNSAID = (
    operator.getitem,
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
)
"""Operations whose results are in the memory of their argument though their schema does not say so."""
STATISTICS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)
"""Operations that move running statistics, arguments 3 and 4, without saying so in their schema."""


def simplify(traced: GraphModule) -> None:
    """Take out what does nothing, and work out once what is the same every time; the graph's result is a flat list."""
    traced.graph.set_codegen(CodeGen())
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = getattr(traced, node.target)
    written = _written(traced.graph)
    for node in list(traced.graph.nodes):
        same = _same(node, written)
        if same is not None:
            node.replace_all_uses_with(same)
            traced.graph.erase_node(node)
    _fold(traced, written)
    _join_biases(traced.graph)
    clear(traced.graph)


def clear(graph: Graph) -> None:
    """Take out what nobody needs."""
    graph.eliminate_dead_code(lambda node: node.is_impure() or node.target in STATISTICS)
    graph.lint()


def shared_with(node: Node) -> Node | None:
    """The argument whose memory a node's result is in: of a view, of an operation in place, of a part of a tuple."""
    if node.op != "call_function":
        return None
    if node.target in UNSAID:
        return node.all_input_nodes[0]
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        memory = {name for result in schema.returns if result.alias_info for name in result.alias_info.before_set}
        parts = any(isinstance(result.type, torch.ListType) for result in schema.returns)
        for argument, given in zip(schema.arguments, node.args, strict=False):
            if (alias := argument.alias_info) is None or not isinstance(given, Node):
                continue
            if alias.before_set & memory or (parts and "*" in alias.after_set):  # lists of views say (a -> *)
                return given
    return None


def root(node: Node) -> Node:
    """The node that made the memory of a node's result."""
    while (source := shared_with(node)) is not None:
        node = source
    return node


def _written(graph: Graph) -> set[Node]:
    """Nodes whose memory some operation writes to."""
    roots = {written for node in graph.nodes for written in _writes(node)}
    return {node for node in graph.nodes if root(node) in roots}


def _writes(node: Node) -> set[Node]:
    """The roots of what an operation writes to."""
    given = list(node.args[3:5]) if node.target in STATISTICS else []
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given.append(value)
    return {root(value) for value in given if isinstance(value, Node)}


def postponable(node: Node, until: Node) -> bool:
    """Whether a node would have the same value at a later one: nothing between them writes to what it is made of."""
    made_of, at = {root(given) for given in node.all_input_nodes}, node.next
    while at is not until:
        if _writes(at) & made_of:
            return False
        at = at.next
    return True


def _same(node: Node, written: set[Node]) -> Node | None:
    """The earlier node that has the same value, if there is one."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    source, value = node.args[0], node.meta.get("val")
    if not isinstance(value, Tensor) or "val" not in source.meta:
        return None
    if node.target in ALIASES or (node.target in SHAPED and example(source).shape == value.shape):
        return source
    if node.target is aten.permute.default and [d % value.dim() for d in _numbers(node.args[1])] == [
        *range(value.dim())
    ]:
        return source
    if node.target is aten.t.default and source.target is aten.t.default:
        return source.all_input_nodes[0]
    if node.target is aten.transpose.int and source.target is aten.transpose.int:
        here, there = ({d % value.dim() for d in _numbers(n.args[1:3])} for n in (node, source))
        return source.args[0] if here == there and isinstance(source.args[0], Node) else None
    if node.target in (aten.mul.Scalar, aten.pow.Tensor_Scalar) and node.args[1] == 1:
        return source if example(source).dtype == value.dtype and not {node, source} & written else None
    return None


def _fold(traced: GraphModule, written: set[Node]) -> None:
    """Replace what depends on no input by its value."""
    known: dict[Node, Tensor] = {}
    for node in list(traced.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or node in written:
            continue
        value = node.meta.get("val")
        if torch.Tag.nondeterministic_seeded in node.target.tags or not isinstance(value, Tensor):
            continue
        if node.target in FILLED:
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            known[node] = like.fill_(FILLED[node.target])
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


def _join_biases(graph: Graph) -> None:
    """Products to which something is added, as one operation."""
    for node in graph.nodes:
        if node.target is aten.add.Tensor and not node.kwargs:
            added, product = node.args
            if isinstance(added, Node) and isinstance(product, Node) and set(product.users) == {node}:
                result = example(node)
                alike = example(product).shape == result.shape and example(product).dtype == result.dtype
                alike = alike and example(added).dtype == result.dtype
                if product.target is aten.bmm.default and alike and postponable(product, node):
                    node.target, node.args = aten.baddbmm.default, (added, *product.args)


def example(node: Node) -> Tensor:
    """An example of a node's value."""
    return node.meta["val"]


def _numbers(arguments: Any) -> list[int]:
    return [int(a) for a in arguments]
