"""Execution of a graph of tensor operations, with little overhead between them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from lightning_modules.lockstep.graphs import aliased_input

BoundProgram = Callable[..., list[Tensor]]
"""Maps the inputs that change from call to call to the results."""


class Program:
    """Runs a graph as generated Python code.

    The code has two parts: views of the state, which are made once by `bind`, and the other operations, which run in
    every call. The code that torch.fx generates calls each operation through a Python object and looks up constants in
    a module, which takes a third of the time where operations take a microsecond.

    Args:
        traced: its graph is a flat list of operations.
        state: number of inputs that are bound once. They may be written to, but must stay at their addresses.
    """

    def __init__(self, traced: GraphModule, state: int):
        self.constants: dict[str, Any] = {}
        """Global names of the generated code: operations and constant arguments."""
        self.source = "\n".join(self._lines(traced, state))
        exec(compile(self.source, "<traced step>", "exec"), self.constants)

    def bind(self, state: Sequence[Tensor]) -> BoundProgram:
        """Return the function of the other inputs."""
        bound: BoundProgram = self.constants["bind"](*state)
        return bound

    def _lines(self, traced: GraphModule, state: int) -> Iterator[str]:
        names = {node: f"v{at}" for at, node in enumerate(traced.graph.nodes)}
        inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
        once = _views(traced, inputs[:state])
        last_uses = _last_uses(traced, {*inputs[:state], *once})
        yield f"def bind({', '.join(names[node] for node in inputs[:state])}):"
        for node in once:
            yield f"    {names[node]} = {self._call(node, names)}"
        yield f"    def step({', '.join(names[node] for node in inputs[state:])}):"
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                self.constants[names[node]] = getattr(traced, node.target)
            elif node.op == "output":
                yield f"        return {self._literal(node.args[0], names)}"
            elif node.op == "call_function" and node not in once:
                yield f"        {names[node]} = {self._call(node, names)}"
                if unused := [names[n] for n in last_uses[node]]:
                    yield f"        del {', '.join(unused)}"
        yield "    return step"

    def _call(self, node: Node, names: dict[Node, str]) -> str:
        target = node.target._op if isinstance(node.target, torch._ops.OpOverload) else node.target
        arguments = [self._literal(value, names) for value in node.args]
        arguments += [f"{key}={self._literal(value, names)}" for key, value in node.kwargs.items()]
        return f"{self._constant(target)}({', '.join(arguments)})"

    def _literal(self, value: Any, names: dict[Node, str]) -> str:
        if isinstance(value, Node):
            return names[value]
        if isinstance(value, list | tuple) and any(isinstance(part, Node) for part in value):
            return f"[{', '.join(self._literal(part, names) for part in value)}]"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """Return a new global name for an operation or a constant argument."""
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name


def _views(traced: GraphModule, state: Sequence[Node]) -> list[Node]:
    """Return the nodes that are views of the state and depend on nothing else."""
    found: dict[Node, None] = dict.fromkeys(state)
    for node in traced.graph.nodes:
        if aliased_input(node) in found and not node.is_impure() and set(node.all_input_nodes) <= set(found):
            found[node] = None
    return list(found)[len(state) :]


def _last_uses(traced: GraphModule, kept: set[Node]) -> dict[Node, list[Node]]:
    """Return, for each operation, the values that no later operation uses, so that their memory can be freed."""
    seen: set[Node] = set()
    last: dict[Node, list[Node]] = {}
    for node in reversed(traced.graph.nodes):
        if node.op != "call_function":
            seen.update(node.all_input_nodes if node.op == "output" else ())
            continue
        used = (node, *node.all_input_nodes)
        last[node] = [n for n in used if n not in seen and n.op != "get_attr" and n not in kept]
        seen.update(used)
    return last
