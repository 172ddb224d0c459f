"""A graph of tensor operations as straight Python code, with as little as possible between the operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from lightning_modules.lockstep.graphs import shared_with

Rest = Callable[..., list[Tensor]]
"""From the inputs that change from call to call to the results."""


class Program:
    """A graph in two parts: views of the first inputs, made once, and the rest, run every time.

    The code that torch makes of a graph calls every operation through a Python object and looks constants up in a
    module; for operations of a microsecond that is a third of the time.

    Args:
        traced: its graph is a flat list of operations.
        fixed: how many inputs are given once. They may be written to, but stay where they are in memory.
    """

    def __init__(self, traced: GraphModule, fixed: int):
        self._known: dict[str, Any] = {}
        self.source = "\n".join(self._lines(traced, fixed))
        exec(compile(self.source, "<traced step>", "exec"), self._known)

    def bind(self, fixed: Sequence[Tensor]) -> Rest:
        """The function of the other inputs."""
        bound: Rest = self._known["bind"](*fixed)
        return bound

    def _lines(self, traced: GraphModule, fixed: int) -> Iterator[str]:
        names = {node: f"v{at}" for at, node in enumerate(traced.graph.nodes)}
        inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
        once = _views(traced, inputs[:fixed])
        last = _last_uses(traced, {*inputs[:fixed], *once})
        yield f"def bind({', '.join(names[node] for node in inputs[:fixed])}):"
        for node in once:
            yield f"    {names[node]} = {self._call(node, names)}"
        yield f"    def rest({', '.join(names[node] for node in inputs[fixed:])}):"
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                self._known[names[node]] = getattr(traced, node.target)
            elif node.op == "output":
                yield f"        return {self._literal(node.args[0], names)}"
            elif node.op == "call_function" and node not in once:
                yield f"        {names[node]} = {self._call(node, names)}"
                over = [names[n] for n in last.get(node, [])]
                if over:
                    yield f"        del {', '.join(over)}"
        yield "    return rest"

    def _call(self, node: Node, names: dict[Node, str]) -> str:
        target = node.target._op if isinstance(node.target, torch._ops.OpOverload) else node.target
        given = [self._literal(value, names) for value in node.args]
        given += [f"{key}={self._literal(value, names)}" for key, value in node.kwargs.items()]
        return f"{self._name(target)}({', '.join(given)})"

    def _literal(self, value: Any, names: dict[Node, str]) -> str:
        if isinstance(value, Node):
            return names[value]
        if isinstance(value, list | tuple) and any(isinstance(part, Node) for part in value):
            return f"[{', '.join(self._literal(part, names) for part in value)}]"
        return self._name(value)

    def _name(self, value: Any) -> str:
        """A global name for what is no tensor: an operation, a size, a type."""
        name = f"c{len(self._known)}"
        self._known[name] = value
        return name


def _views(traced: GraphModule, fixed: Sequence[Node]) -> list[Node]:
    """What is nothing but a view of inputs that are given once."""
    found: dict[Node, None] = dict.fromkeys(fixed)
    for node in traced.graph.nodes:
        if shared_with(node) in found and not node.is_impure() and set(node.all_input_nodes) <= set(found):
            found[node] = None
    return list(found)[len(fixed) :]


def _last_uses(traced: GraphModule, stay: set[Node]) -> dict[Node, list[Node]]:
    """What can be forgotten after each operation, so that its memory is free for the next."""
    seen: set[Node] = set()
    last: dict[Node, list[Node]] = {}
    for node in reversed(traced.graph.nodes):
        if node.op != "call_function":
            seen.update(node.all_input_nodes if node.op == "output" else ())
            continue
        over = [n for n in (node, *node.all_input_nodes) if n not in seen and n.op != "get_attr" and n not in stay]
        seen.update((node, *node.all_input_nodes))
        last[node] = over
    return last
