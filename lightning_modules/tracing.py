"""One training step of a stack of clients, traced once into a flat list of tensor operations and run many times.

`vmap` and `grad` turn the objective of one client into that of a stack. What they cost is mostly their own bookkeeping,
operation by operation; a trace leaves the operations alone. Where a weight's gradient is a matrix product and the step
is plain gradient descent, the product is added to the weights at once, so that the gradient is never stored.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg

from lightning_modules.base import Batch, Terms
from pflsim.types import Tensors

aten = torch.ops.aten
SHAPED = (aten.expand.default, aten.view.default, aten._unsafe_view.default)
ALIASES = (aten.alias.default, aten.detach.default)
VIEWS = (*SHAPED, *ALIASES, aten.transpose.int, aten.permute.default, aten.select.int, aten.slice.Tensor,
         aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)  # fmt: skip
FILLED = {aten.ones_like.default: torch.ones, aten.zeros_like.default: torch.zeros, aten.new_zeros.default: torch.zeros}
"""Operations whose result follows from a shape alone."""


class TracedStep:
    """The step of a stack, as a function of its values and a batch.

    Args:
        module: gives the structure; its own values are not used.
        objective: name of the module's method that maps a batch to named scalar loss terms; a pure function of the
            batch and of the module's parameters and buffers.
        trainable: names of the parameters that move.
        values: all parameters and buffers by name, the clients' axis first [n, ...]. Their shapes count.
        batch: inputs [n, B, ...] and labels [n, B]. Their shapes count.
        plain: whether the step is gradient descent and nothing else, done in the graph; else the gradients come out.
    """

    def __init__(
        self, module: nn.Module, objective: str, trainable: Sequence[str], values: Tensors, batch: Batch, plain: bool
    ):
        self.trainable, self.plain = tuple(trainable), plain
        self.fixed = tuple(name for name in values if name not in self.trainable)
        self.terms: list[str] = []
        self.graph = self._trace(module, objective, [torch.zeros_like(p) for p in self._arguments(values, batch)])
        simplify(self.graph)
        untouched = _leave_out_constants(self.graph, len(self.trainable))
        self.moved = tuple(name for at, name in enumerate(self.trainable) if at not in untouched)
        if plain:
            descend_in_place(self.graph, [at for at in range(len(self.trainable)) if at not in untouched])

    def __call__(self, values: Tensors, batch: Batch, lr: float) -> tuple[Sequence[Tensor], Terms]:
        """Returns the gradients of `moved` (none where they have been used) and the loss terms, each [n]."""
        rate = [lr] if self.plain else []
        with torch.no_grad():
            found = self.graph(*self._arguments(values, batch), *rate)
        first = len(found) - len(self.terms)
        return found[:first], dict(zip(self.terms, found[first:], strict=True))

    def _arguments(self, values: Tensors, batch: Batch) -> list[Tensor]:
        return [*(values[name] for name in (*self.trainable, *self.fixed)), *batch]

    def _trace(self, module: nn.Module, objective: str, arguments: list[Tensor]) -> GraphModule:
        forward, count = _Objective(module, objective), len(self.trainable)

        def one(moved: list[Tensor], still: list[Tensor], inputs: Tensor, labels: Tensor) -> list[Tensor]:
            def loss(moved: list[Tensor], still: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
                given = zip((*self.trainable, *self.fixed), (*moved, *still), strict=True)
                terms: Terms = functional_call(forward, {f"module.{k}": v for k, v in given}, ((inputs, labels),))
                self.terms = list(terms)
                return torch.stack(list(terms.values())).sum(), list(terms.values())

            gradients, terms = grad(loss, has_aux=True)(moved, still)
            return [*gradients, *terms]

        def flat(*arguments: Tensor) -> list[Tensor]:
            moved, still = list(arguments[:count]), list(arguments[count:-2])
            return vmap(one, randomness="different")(moved, still, *arguments[-2:])

        return make_fx(flat)(*arguments)


class _Objective(nn.Module):
    """A module's method as the forward pass of another, for `functional_call`."""

    def __init__(self, module: nn.Module, name: str):
        super().__init__()
        self.module, self.name = module, name

    def forward(self, batch: Batch) -> Terms:
        return getattr(self.module, self.name)(batch)


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
    traced.graph.eliminate_dead_code()
    traced.graph.lint()
    traced.recompile()


def _written(graph: Graph) -> set[Node]:
    """Nodes whose memory some operation writes to, themselves or through a view."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, Node):
                    found.update({node, given})
    for node in reversed(graph.nodes):
        if node in found and node.target in VIEWS:
            found.add(node.args[0])
    for node in graph.nodes:
        if node.target in VIEWS and node.args[0] in found:
            found.add(node)
    return found


def _same(node: Node, written: set[Node]) -> Node | None:
    """The earlier node that has the same value, if there is one."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    source, value = node.args[0], node.meta.get("val")
    if not isinstance(value, Tensor) or "val" not in source.meta:
        return None
    if node.target in ALIASES or (node.target in SHAPED and _value(source).shape == value.shape):
        return source
    if node.target is aten.permute.default and [d % value.dim() for d in _numbers(node.args[1])] == [
        *range(value.dim())
    ]:
        return source
    if node.target is aten.transpose.int and source.target is aten.transpose.int:
        here, there = ({d % value.dim() for d in _numbers(n.args[1:3])} for n in (node, source))
        return source.args[0] if here == there and isinstance(source.args[0], Node) else None
    if node.target in (aten.mul.Scalar, aten.pow.Tensor_Scalar) and node.args[1] == 1:
        return source if _value(source).dtype == value.dtype and not {node, source} & written else None
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
            known[node] = FILLED[node.target](value.shape, dtype=value.dtype, device=value.device)
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


def _leave_out_constants(traced: GraphModule, count: int) -> list[int]:
    """Take constants out of the first `count` results: gradients of what the objective does not touch."""
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    results = list(output.args[0])
    constant = [at for at, node in enumerate(results[:count]) if node.op == "get_attr"]
    output.args = ([node for at, node in enumerate(results) if at not in constant],)
    traced.recompile()
    return constant


def descend_in_place(traced: GraphModule, moved: Sequence[int]) -> None:
    """Turn the first results, gradients of the inputs `moved`, into p ← p − lr·gradient; lr is a new last input."""
    graph = traced.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    with graph.inserting_after(inputs[-1]):
        lr = graph.placeholder("lr")
    with graph.inserting_before(output):
        rate = graph.call_function(operator.neg, (lr,))
        for at, gradient in zip(moved, results, strict=False):
            _add(graph, inputs[at], gradient, rate, output)
    output.args = (results[len(moved) :],)
    graph.eliminate_dead_code()
    graph.lint()
    traced.recompile()


def _add(graph: Graph, parameter: Node, gradient: Node, rate: Node, user: Node) -> None:
    """Add rate·gradient: a sum term by term, a matrix product without storing it, where only `user` needs it."""
    alone, shape = set(gradient.users) == {user}, _value(parameter).shape
    terms = gradient.args[:2]
    if alone and gradient.target is aten.bmm.default:
        graph.call_function(aten.baddbmm_.default, (parameter, *terms), {"alpha": rate})
    elif alone and gradient.target is aten.add.Tensor and not gradient.kwargs and _both(terms, shape):
        for term in terms:
            _add(graph, parameter, term, rate, gradient)  # type: ignore[arg-type]
    else:
        graph.call_function(aten.add_.Tensor, (parameter, gradient), {"alpha": rate})


def _both(terms: Sequence[Any], shape: torch.Size) -> bool:
    return terms[0] is not terms[1] and all(isinstance(t, Node) and _value(t).shape == shape for t in terms)


def _value(node: Node) -> Tensor:
    """An example of a node's value."""
    return node.meta["val"]


def _numbers(arguments: Any) -> list[int]:
    return [int(a) for a in arguments]
