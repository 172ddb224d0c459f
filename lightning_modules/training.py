"""The run's local training settings."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from lightning_modules.optimizers import OptimizerChoice
from pflsim.config.settings import Settings
from pflsim.config.validate import bounded, stable_penalty
from pflsim.errors import SettingsError
from pflsim.tasks.task import Task
from pflsim.types import Buffers, Precision

LrSchedule = Literal["constant", "exponential", "step", "cosine"]


@dataclass(frozen=True, slots=True)
class Training:
    """Local training settings of a run. Every client module gets them; a `Phase` may override some.

    Args:
        lr: learning rate of round 1.
        lr_schedule: how the rate of round t follows from it: "constant", lr; "exponential", lr · lr_decay^(t−1);
            "step", lr · lr_decay^⌊(t−1)/lr_step⌋; or "cosine", lr · ½·(1 + cos(π·(t−1)/T)) with T rounds.
        lr_decay, lr_step: see `lr_schedule`.
        lr_warmup: in the first rounds t ≤ lr_warmup, the rate is multiplied by t / lr_warmup.
        optimizer: of all phases that are not plain.
        momentum, weight_decay: of the optimiser.
        clip_grad_norm: gradients of a step with a larger norm are scaled down to it.
        precision: of convolutions and matrix products. Parameters, loss terms and messages are float32 always.
        task: what is predicted, and the loss.
        local_epochs: passes over the training shard per round; ignored if local_steps is given.
        local_steps: optimiser steps per round.
        batch_size: examples per mini-batch; the last one of an epoch may be smaller.
        accumulate_grad_batches: mini-batches whose mean gradient, weighted by their examples, is that of a step.
        buffers: how running statistics of normalisation layers are handled.
        seed: of the run, for random decisions that clients and server make alike without a message.
        rounds: T.
        fraction: of the clients that take part in a round, in (0, 1].
        clients: their number, with those that join after the last round.
        method: its name, for errors.

    Raises:
        SettingsError: settings contradict each other.
    """

    lr: float = 0.01
    lr_schedule: LrSchedule = "exponential"
    lr_decay: float = 1.0
    lr_step: int = 1
    lr_warmup: int = 0
    optimizer: OptimizerChoice = field(default_factory=OptimizerChoice)
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_grad_norm: float | None = None
    precision: Precision = "ieee"
    task: Task = field(default_factory=Task)
    local_epochs: int = 1
    local_steps: int | None = None
    batch_size: int = 20
    accumulate_grad_batches: int = 1
    buffers: Buffers = "aggregate"
    seed: int = 0
    rounds: int = 1
    fraction: float = 1.0
    clients: int = 1
    method: str = ""

    def __post_init__(self) -> None:
        if self.lr_schedule in ("constant", "cosine") and self.lr_decay != 1:
            raise SettingsError(f"lr_decay={self.lr_decay:g} has no effect with lr_schedule={self.lr_schedule}")
        if self.lr_schedule != "step" and self.lr_step != 1:
            raise SettingsError(f"lr_step={self.lr_step} needs lr_schedule=step")
        if self.optimizer.name != "sgd" and self.momentum:
            raise SettingsError(f"momentum={self.momentum:g} is of optimizer=sgd; {self.optimizer.name} has its own")

    @classmethod
    def of(cls, settings: Settings) -> Training:
        """Return the local training settings of a run."""
        same = {one.name for one in fields(cls)} - {"optimizer", "local_epochs", "task", "method"}
        return cls(
            **{name: getattr(settings, name) for name in same},
            optimizer=OptimizerChoice(**asdict(settings.optimizer)),
            local_epochs=settings.local_epochs or 1,
        )

    @property
    def step_size(self) -> int:
        """Examples of an optimiser step."""
        return self.batch_size * self.accumulate_grad_batches

    def lr_factor(self, round_number: int) -> float:
        """Return by what the learning rates of round t are multiplied; in the initial round as in round 1."""
        past = max(round_number, 1) - 1
        warmup = min(1.0, (past + 1) / self.lr_warmup) if self.lr_warmup else 1.0
        if self.lr_schedule == "cosine":
            return warmup * (1 + math.cos(math.pi * min(past, self.rounds - 1) / self.rounds)) / 2
        return warmup * self.lr_decay ** (past // self.lr_step)

    def require_sgd(self, method: str) -> None:
        """Refuse other optimisers than SGD.

        Args:
            method: the method whose equations are steps of gradient descent, for the error.

        Raises:
            SettingsError: the run has another optimiser.
        """
        if self.optimizer.name != "sgd":
            raise SettingsError(
                f"optimizer={self.optimizer.name}: {method} is defined by steps of gradient descent; use sgd"
            )
        if self.optimizer.parts:
            raise SettingsError(f"optimizer.parts: the equations of {method} have one learning rate; leave it out")

    def penalty(self, name: str, value: float) -> float:
        """Return `value`, the coefficient of a proximal term, after checking it against the learning rate.

        Args:
            name: of the setting, for the error.
            value: coefficient c of a term c/2·‖w − a‖².

        Raises:
            SettingsError: the value is negative, or so large that training would diverge.
        """
        if self.optimizer.name != "sgd":
            return bounded(name, value, 0)
        return stable_penalty(name, value, self.lr, self.momentum)

    def require_plain_sgd(self, method: str) -> None:
        """Check that the run has SGD with neither momentum nor weight decay nor clipping.

        Args:
            method: its name, for the error.

        Raises:
            SettingsError: the run has another optimiser, or one of them.
        """
        self.require_sgd(method)
        if (clip := self.clip_grad_norm) is not None:
            raise SettingsError(f"clip_grad_norm={clip:g}: the equations of {method} hold without it only")
        for name, value in (("momentum", self.momentum), ("weight_decay", self.weight_decay)):
            if value:
                raise SettingsError(f"{name}={value}: the equations of {method} hold for plain SGD only; use {name}=0")
