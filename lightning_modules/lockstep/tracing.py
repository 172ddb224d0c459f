"""One training step of a stack of clients, traced once and run many times.

`vmap` turns the objective of one client into that of a stack. Most of its cost is its own bookkeeping per
operation, which a trace leaves out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_modules.base import Batch, ClientModule, Evaluate, Evaluation, Terms
from lightning_modules.lockstep.compiler import compile_step
from lightning_modules.lockstep.recorder import record
from lightning_modules.nets.frozen import Frozen
from pflsim.tasks.task import in_float32
from pflsim.types import Tensors

BoundStep = Callable[[Batch, float], tuple[Sequence[Tensor], Sequence[Tensor]]]
"""Maps a batch and the learning rate to gradients (empty if the step applied them) and loss terms."""


class TracedStep:
    """The training step of a stack of clients.

    A stack of one client is traced without `vmap`: its gradients have no client axis, and its loss terms are scalars.

    Args:
        module: gives the structure; its own values are not used.
        objective: name of the module's method that maps a batch to named scalar loss terms. It must be a pure function
            of the batch and of the module's parameters and buffers.
        trainable: names of the parameters to train.
        values: all parameters and buffers by name, with the client axis first, [n, ...]. Only shapes and strides are
            used.
        batch: inputs [n, B, ...] and targets [n, B] or [n, B, T]. Only their shapes are used.
        plain: whether the optimiser is gradient descent without momentum and weight decay. The step then applies the
            gradients itself; otherwise it returns them.
        gradients: see `ClientModule.gradients`; None: those of the objective.

    Raises:
        ValueError: the objective cannot be traced; see `compile_step`.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: str,
        trainable: Sequence[str],
        values: Tensors,
        batch: Batch,
        plain: bool,
        gradients: Callable[[Evaluate, Sequence[Tensor], int], Evaluation] | None = None,
    ):
        self.gradients = gradients or (lambda evaluate, values, size: evaluate(values, slice(size)))
        self.trainable, self.plain, self.stacked = tuple(trainable), plain, len(batch[1]) > 1
        self.fixed = tuple(name for name in values if name not in self.trainable)
        self.terms: list[str] = []
        self.moved: tuple[str, ...] = ()
        inputs = [*self._ordered(values), *(part if self.stacked else part[0] for part in batch)]
        traced = self._trace(module, objective, [torch.zeros_like(p) for p in inputs])
        state = len(inputs) - 2
        moved = [self.trainable.index(name) for name in self.moved]
        self.program = compile_step(traced, moved, state, plain, objective)

    def bind(self, values: Tensors) -> BoundStep:
        """Return the step for state tensors that stay at their addresses; a plain step changes them.

        Returns:
            A function of a batch and the learning rate. It returns the gradients of `moved` (none for a plain step) and
            the loss terms in the order of `terms`, each [n]; for a stack of one, all without this axis.
        """
        program, gradients = self.program.bind(self._ordered(values)), 0 if self.plain else len(self.moved)

        def step(batch: Batch, lr: float) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
            inputs, labels = batch if self.stacked else (batch[0][0], batch[1][0])
            with torch.inference_mode():
                results = program(inputs, labels, lr) if self.plain else program(inputs, labels)
            return results[:gradients], results[gradients:]

        return step

    def _ordered(self, values: Tensors) -> list[Tensor]:
        chosen = [values[name] for name in (*self.trainable, *self.fixed)]
        return chosen if self.stacked else [value[0] for value in chosen]

    def _trace(self, module: nn.Module, objective: str, arguments: list[Tensor]) -> GraphModule:
        forward, count = AsForward(module, objective), len(self.trainable)

        def terms_of(state: list[Tensor], inputs: Tensor, labels: Tensor) -> list[Tensor]:
            named = zip((*self.trainable, *self.fixed), state, strict=True)
            terms: Terms = functional_call(forward, {f"module.{k}": v for k, v in named}, ((inputs, labels),))
            self.terms = list(terms)
            return [torch.stack(list(terms.values())).sum(), *map(in_float32, terms.values())]

        def step(*arguments: Tensor) -> list[Tensor]:
            *state, inputs, labels = arguments
            size = labels.shape[1 if self.stacked else 0]

            def evaluate(values: Sequence[Tensor], rows: slice) -> Evaluation:
                chosen = inputs, labels
                if rows != slice(size):
                    chosen = (inputs[:, rows], labels[:, rows]) if self.stacked else (inputs[rows], labels[rows])
                losses, *terms = objectives([*values, *state[count:]], *chosen)
                # clients are independent, so the gradient of the sum has the gradient of each
                total, named = losses.sum(), dict(zip(self.terms, terms, strict=True))
                if not total.requires_grad:  # it depends on none of them
                    return named, [None] * len(values)
                return named, torch.autograd.grad(total, values, allow_unused=True)

            terms, gradients = self.gradients(evaluate, state[:count], size)
            self.moved = tuple(name for name, g in zip(self.trainable, gradients, strict=True) if g is not None)
            return [*(g for g in gradients if g is not None), *terms.values()]

        objectives = vmap(terms_of, randomness="different") if self.stacked else terms_of
        # tracing runs the operations; a run must not depend on which client caused a trace
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        # vmap has no rule for the fused kernels of attention
        attention = sdpa_kernel(SDPBackend.MATH) if self.stacked else nullcontext()
        with torch.random.fork_rng(devices=devices), attention:
            return record(step, [p.requires_grad_(at < count) for at, p in enumerate(arguments)])


class AsForward(nn.Module):
    """Makes a method of a module the forward pass, for `functional_call`."""

    def __init__(self, module: nn.Module, name: str):
        super().__init__()
        self.module, self.name = module, name

    def forward(self, argument: Any) -> Any:
        """Call the method.

        Raises:
            ValueError: it assigns a new tensor to a buffer.
        """
        before = dict(self.module.named_buffers())
        result = getattr(self.module, self.name)(argument)
        for name, buffer in self.module.named_buffers():
            if buffer is not before.get(name):
                raise ValueError(
                    f"{self.name} assigns a new tensor to the buffer {name}; change it in place with copy_"
                )
        return result


def bind_state(module: ClientModule, values: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    """Make tensors the module's parameters and buffers without copying, and return all its parameters by name.

    Anchors that are not among the tensors are cleared.
    """
    module.clear_anchors()
    parameters = dict(module.named_parameters())
    for name, value in values.items():
        if name in parameters:
            parameters[name].data = value
        else:
            owner, _, key = name.rpartition(".")
            submodule = module.get_submodule(owner)
            if key in submodule._buffers:
                submodule._buffers[key] = value
            else:  # of an anchor
                submodule.register_buffer(key, value, persistent=False)
    return parameters


@contextmanager
def restored_state(module: ClientModule) -> Iterator[None]:
    """Bind the module to its former tensors again at the end of the block.

    Otherwise it would keep rows of a stack. Their memory alignment affects the last bits of products, so results of the
    next client on this module would depend on who trained before.
    """
    module.clear_anchors()
    before = {name: value.detach() for name, value in state_of(module).items()}
    try:
        yield
    finally:
        bind_state(module, before)


def clone_state(module: ClientModule) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers by name, with the same strides, without frozen ones."""
    return {name: value.detach().clone() for name, value in state_of(module).items()}


def state_of(module: ClientModule) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, without frozen ones."""
    buffers = {name: value for name, value in module.named_buffers() if not isinstance(value, Frozen)}
    return {**dict(module.named_parameters()), **buffers}
