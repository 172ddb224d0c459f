"""A cache of traced training steps."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_modules.base import Batch, ClientModule
from lightning_modules.lockstep.tracing import TracedStep
from lightning_modules.lockstep.values import bind_state
from lightning_modules.phases import Phase
from pflsim.types import Tensors

MAX_TRACES = 100
"""Number of traces at which the cache is cleared."""


class Traces:
    """Traced steps of one module, by phase and shapes.

    Args:
        module: of the clients' architecture.
    """

    def __init__(self, module: ClientModule):
        self.module = module
        self._steps: dict[object, TracedStep] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[TracedStep]:
        return iter(self._steps.values())

    def of(self, phase: Phase, trainable: tuple[str, ...], values: Tensors, batch: Batch) -> TracedStep:
        """Return the step of a phase for values [n, ...] and a batch [n, B, ...] of these shapes and strides."""
        settings = self.module.training_settings
        key = (phase.objective, trainable, tuple((k, v.shape, v.stride()) for k, v in values.items()), batch[0].shape)
        if key not in self._steps:
            if len(self._steps) == MAX_TRACES:
                self._steps.clear()
            bind_state(self.module, {name: value[0] for name, value in values.items()})
            plain = not settings.momentum and not settings.weight_decay
            self._steps[key] = TracedStep(self.module, phase.objective, trainable, values, batch, plain)
        return self._steps[key]
