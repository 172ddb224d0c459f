"""One client's training, separate from the module that computes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_modules.phases import Stage
from pflsim.data.federated import Examples


@dataclass(slots=True)
class ClientTraining:
    """A client's state, data and schedule for one round, and the results of its training.

    Args:
        values: all parameters and buffers by name, including anchors; training replaces the values.
        pool: examples of several clients, on the module's device.
        first, count: this client's examples are the rows first .. first + count − 1 of the pool.
        generator: draws the order of its examples.
        stages: its schedule.
        work: train only this share of each stage's batches, in (0, 1]; see `loop.epoch_orders`.
        taken: number of mini-batches so far.
        sums, counts: sum and number of values of each named loss term so far.
    """

    values: dict[str, Tensor]
    pool: Examples
    first: int
    count: int
    generator: torch.Generator
    stages: tuple[Stage, ...]
    work: float = 1.0
    taken: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def stack_key(self) -> object:
        """Clients with equal keys can be stacked: they have the same stages, shapes and dtypes."""
        return self.stages, tuple((name, value.shape, value.dtype) for name, value in self.values.items())

    @property
    def losses(self) -> dict[str, float]:
        """Mean of each named loss term over the mini-batches."""
        return {name: float(total) / self.counts[name] for name, total in self.sums.items()}
