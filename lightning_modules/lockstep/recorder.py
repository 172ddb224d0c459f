"""Recording of tensor operations as a graph.

`torch.fx.experimental.proxy_tensor.make_fx` does the same. It imports the compiler of PyTorch, which takes seconds in
every process, and is five times slower.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten


def record(function: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor]) -> GraphModule:
    """Run a function and return its operations as a graph of ATen operations.

    The function may use the transforms of `torch.func`. Tensors that are neither arguments nor results of operations
    are constants of the graph.

    Args:
        function: maps the arguments to tensors.
        arguments: the inputs of the graph.

    Returns:
        A graph whose result is a list of tensors. `meta["val"]` of a node has the shape, strides and dtype of its
        value, without memory, and `meta["device"]` its device.
    """
    recorder = _Recorder(arguments)
    with recorder:
        results = function(*arguments)
    return recorder.finish(results)


class _Recorder(TorchDispatchMode):
    def __init__(self, arguments: Sequence[Tensor]):
        super().__init__()
        self.constants, self.graph = nn.Module(), Graph()
        self.nodes = WeakTensorKeyDictionary()
        for at, argument in enumerate(arguments):
            self._store(self.graph.placeholder(f"input{at}"), argument)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports the compiler

    def __torch_dispatch__(
        self, function: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is aten.lift_fresh.default:  # a constant that later operations may change
            function = aten.lift_fresh_copy.default
        inputs = tree_map_only(Tensor, self._node, (tuple(args), dict(kwargs or {})))
        value = function(*args, **(kwargs or {}))
        self._store(self.graph.call_function(function, *inputs), value)
        return value

    def finish(self, results: Sequence[Tensor]) -> GraphModule:
        """Return the graph with these results."""
        self.graph.output([self._node(result) for result in results])
        return GraphModule(self.constants, self.graph)

    def _store(self, node: Node, value: Any) -> None:
        if isinstance(value, Tensor):
            node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            node.meta["device"] = value.device
            self.nodes[value] = node
        elif isinstance(value, list | tuple):
            for at, item in enumerate(value):
                self._store(self.graph.call_function(operator.getitem, (node, at)), item)

    def _node(self, value: Tensor) -> Node:
        if value not in self.nodes:
            name = f"tensor{len(list(self.constants.buffers()))}"
            self.constants.register_buffer(name, value.detach())
            self.nodes[value] = self.graph.get_attr(name)
        return self.nodes[value]
