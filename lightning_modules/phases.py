"""The optimisation schedule of a round, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_modules.training import Training
from pflsim.params import NET, Selector


@dataclass(frozen=True, slots=True)
class Phase:
    """One kind of step: what is trained, for which objective, for how long, at which rate.

    Args:
        name: goes before the names of its loss terms where a schedule has several phases, e.g. `head/ce`.
        objective: name of the module's method that maps a batch to named loss terms.
        trainable: the parameters that move; all others are held fixed.
        epochs, steps: how long; neither given: the run's local_epochs or local_steps.
        lr: learning rate of round 1, None: the run's.
        lockstep: whether a stack of clients can take the step together, where the module allows it at all.
    """

    name: str = "local"
    objective: str = "objective"
    trainable: Selector = NET
    epochs: int | None = None
    steps: int | None = None
    lr: float | None = None
    lockstep: bool = True


@dataclass(frozen=True, slots=True)
class Alternate:
    """Phases that take turns: on every mini-batch (the same one for each), or epoch by epoch.

    Args:
        phases: in the order of their turns; their own epochs and steps are not used.
        every: "batch" or "epoch".
        epochs, steps: how long altogether; neither given: the run's. With every="epoch" each phase gets that many
            epochs; steps are then counted for each phase too, in one turn.
    """

    phases: tuple[Phase, ...]
    every: Literal["batch", "epoch"] = "batch"
    epochs: int | None = None
    steps: int | None = None


Schedule = Sequence[Phase | Alternate]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of training: on each mini-batch every one of `phases` takes a step, for so many epochs or steps."""

    phases: tuple[Phase, ...]
    epochs: int | None
    steps: int | None


def stages(schedule: Schedule, training: Training) -> tuple[Stage, ...]:
    """Lay a schedule out as the stretches that are run one after the other."""
    laid: list[Stage] = []
    for part in schedule:
        epochs, steps = part.epochs, part.steps
        if epochs is None and steps is None:
            steps = training.local_steps
            epochs = None if steps is not None else training.local_epochs
        if isinstance(part, Phase):
            laid.append(Stage((part,), epochs, steps))
        elif part.every == "batch":
            laid.append(Stage(part.phases, epochs, steps))
        elif steps is not None:
            laid.extend(Stage((phase,), None, steps) for phase in part.phases)
        else:
            laid.extend(Stage((phase,), 1, None) for _ in range(epochs or 0) for phase in part.phases)
    return tuple(laid)
