"""A client about to train, apart from the module that works for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_modules.phases import Stage
from pflsim.data.federated import Examples


@dataclass(slots=True)
class ClientTraining:
    """A client about to train.

    Args:
        values: all of its parameters and buffers by name, those held for the round too; new values come out here.
        pool: examples of several clients, on the module's device.
        first, count: where its own lie in the pool.
        order: decides the order of its examples.
        stages: its schedule.
        work: the share of every stage's batches that it takes, in (0, 1]; see `loop.passes`.
    """

    values: dict[str, Tensor]
    pool: Examples
    first: int
    count: int
    order: torch.Generator
    stages: tuple[Stage, ...]
    work: float = 1.0
    taken: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> object:
        """What trainees must have in common to be stacked."""
        return self.stages, tuple((name, value.shape, value.dtype) for name, value in self.values.items())

    @property
    def losses(self) -> dict[str, float]:
        """The mean over its mini-batches of every named loss term."""
        return {name: float(total) / self.counts[name] for name, total in self.sums.items()}
