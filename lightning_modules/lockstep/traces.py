"""The traces of a module's steps, made when they are first needed."""

from __future__ import annotations

from lightning_modules.base import Batch, ClientModule
from lightning_modules.lockstep.tracing import TracedStep
from lightning_modules.lockstep.values import bind_state
from lightning_modules.phases import Phase
from pflsim.types import Tensors

MOST = 100
"""Traces that are kept."""


class Traces:
    """Traced steps by phase and shapes.

    Args:
        module: of the architecture.
    """

    def __init__(self, module: ClientModule):
        self.module = module
        self._made: dict[object, TracedStep] = {}

    def __len__(self) -> int:
        return len(self._made)

    def of(self, phase: Phase, trainable: tuple[str, ...], values: Tensors, batch: Batch) -> TracedStep:
        """The step of a phase for values [n, ...] and a batch [n, B, ...] of these shapes and strides."""
        settings = self.module.training_settings
        key = (phase.objective, trainable, tuple((k, v.shape, v.stride()) for k, v in values.items()), batch[0].shape)
        if key not in self._made:
            if len(self._made) == MOST:
                self._made.clear()
            bind_state(self.module, {name: value[0] for name, value in values.items()})
            plain = not settings.momentum and not settings.weight_decay
            self._made[key] = TracedStep(self.module, phase.objective, trainable, values, batch, plain)
        return self._made[key]
