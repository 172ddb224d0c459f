"""The run's local training settings, as every client module gets them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pflsim.config.validate import stable_pull
from pflsim.types import Buffers


@dataclass(frozen=True, slots=True)
class Training:
    """How a client trains in a round, unless a phase says otherwise.

    Args:
        lr: learning rate of round 1; round t has lr · lr_decay^(t−1).
        momentum, weight_decay: of SGD. The optimiser starts afresh in every round.
        local_epochs: passes over the training shard a round; ignored where local_steps is given.
        local_steps: mini-batches a round.
        batch_size: examples per mini-batch; the last one of an epoch may be smaller.
        buffers: what happens to running statistics of normalisation layers.
        seed: the run's, for random decisions that clients and server make alike without a message.
        last_round: the last one in which anybody trains, for what must hold in all of them.
    """

    lr: float = 0.01
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    local_epochs: int = 1
    local_steps: int | None = None
    batch_size: int = 20
    buffers: Buffers = "aggregate"
    seed: int = 0
    last_round: int = 1

    @property
    def highest_lr(self) -> float:
        """The learning rate of the first round or of the last one, whichever is higher; infinite beyond all numbers."""
        try:
            return self.lr * max(1.0, self.lr_decay ** (self.last_round - 1))
        except OverflowError:
            return math.inf

    def penalty(self, name: str, value: float) -> float:
        """Return value, the strength of a proximal term, held to the learning rates of all rounds.

        Raises:
            SettingsError: it is negative, or so large that training would diverge by it.
        """
        return stable_pull(name, value, self.highest_lr, self.momentum)
