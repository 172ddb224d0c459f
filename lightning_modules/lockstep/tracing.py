"""One training step of a stack of clients, traced once into a flat list of tensor operations and run many times.

`vmap` and `grad` turn the objective of one client into that of a stack. What they cost is mostly their own bookkeeping,
operation by operation; a trace leaves the operations alone. Where a weight's gradient is a matrix product and the step
is plain gradient descent, the product is added to the weights at once, so that the gradient is never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_modules.base import Batch, Terms
from lightning_modules.lockstep.graphs import example, simplify
from lightning_modules.lockstep.program import Program
from lightning_modules.lockstep.updates import copy_inputs, descend_in_place, leave_out_zeros
from pflsim.types import Tensors

Step = Callable[[Batch, float], tuple[Sequence[Tensor], Sequence[Tensor]]]
"""From a batch and the learning rate to gradients (none where they have been used) and loss terms."""


class TracedStep:
    """The step of a stack, as a function of its values and a batch.

    A stack of one is traced without `vmap`: its gradients have no clients' axis, its loss terms are scalars.

    Args:
        module: gives the structure; its own values are not used.
        objective: name of the module's method that maps a batch to named scalar loss terms; a pure function of the
            batch and of the module's parameters and buffers.
        trainable: names of the parameters that move.
        values: all parameters and buffers by name, the clients' axis first [n, ...]. Their shapes and strides count.
        batch: inputs [n, B, ...] and labels [n, B]. Their shapes count.
        plain: whether the step is gradient descent and nothing else, done in the graph; else the gradients come out.
    """

    def __init__(
        self, module: nn.Module, objective: str, trainable: Sequence[str], values: Tensors, batch: Batch, plain: bool
    ):
        self.trainable, self.plain, self.stacked = tuple(trainable), plain, len(batch[1]) > 1
        self.fixed = tuple(name for name in values if name not in self.trainable)
        self.terms: list[str] = []
        given = [*self._values(values), *(part if self.stacked else part[0] for part in batch)]
        traced = self._trace(module, objective, [torch.zeros_like(p) for p in given])
        _refuse_decisions(traced, objective)
        simplify(traced)
        untouched = leave_out_zeros(traced, len(self.trainable))
        self.moved = tuple(name for at, name in enumerate(self.trainable) if at not in untouched)
        copy_inputs(traced)
        if plain:
            descend_in_place(traced, [at for at in range(len(self.trainable)) if at not in untouched])
        self.program = Program(traced, len(given) - 2)

    def bind(self, values: Tensors) -> Step:
        """The step for values that stay where they are in memory; plain steps move them.

        Returns:
            A function of a batch and the learning rate, which gives the gradients of `moved` (none for a plain step)
            and the loss terms in the order of `terms`, each [n], or all without this axis for a stack of one.
        """
        rest, moved = self.program.bind(self._values(values)), 0 if self.plain else len(self.moved)

        def step(batch: Batch, lr: float) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
            inputs, labels = batch if self.stacked else (batch[0][0], batch[1][0])
            with torch.inference_mode():
                found = rest(inputs, labels, lr) if self.plain else rest(inputs, labels)
            return found[:moved], found[moved:]

        return step

    def _values(self, values: Tensors) -> list[Tensor]:
        chosen = [values[name] for name in (*self.trainable, *self.fixed)]
        return chosen if self.stacked else [value[0] for value in chosen]

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

        step = vmap(one, randomness="different") if self.stacked else one

        def flat(*arguments: Tensor) -> list[Tensor]:
            return step(list(arguments[:count]), list(arguments[count:-2]), *arguments[-2:])

        # Tracing runs the operations: whoever comes first must leave the random numbers as they were.
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            return make_fx(flat)(*arguments)


def _refuse_decisions(traced: GraphModule, objective: str) -> None:
    """Stop where a trace would hold what was decided by values, which are all zero in it."""
    for node in traced.graph.nodes:
        tags = getattr(node.target, "tags", ())
        by_values = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        if node.target is torch.ops.aten.index.Tensor:  # only a mask decides
            by_values = any(part is not None and example(part).dtype == torch.bool for part in node.args[1])
        if by_values:
            raise ValueError(
                f"{objective} cannot be traced: the shape of {node.target}'s result depends on values; use "
                "lockstep=false, or say lockstep = False in the class"
            )


class _Objective(nn.Module):
    """A module's method as the forward pass of another, for `functional_call`."""

    def __init__(self, module: nn.Module, name: str):
        super().__init__()
        self.module, self.name = module, name

    def forward(self, batch: Batch) -> Terms:
        before = dict(self.module.named_buffers())
        terms: Terms = getattr(self.module, self.name)(batch)
        for name, buffer in self.module.named_buffers():
            if buffer is not before.get(name):
                raise ValueError(
                    f"{self.name} assigns to the buffer {name}, which would be lost: change it in place (copy_, mul_)"
                )
        return terms
