"""The optimisation schedule of a round, as data."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_modules.training import Training
from pflsim.params import NET, Selector


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of local training: one objective, the parameters it trains, its length and its learning rate.

    Args:
        name: prefix of its loss terms where a schedule has several phases, for example `head/ce`.
        objective: name of the module's method that maps a batch to named loss terms.
        trainable: parameters that are updated; all others stay fixed.
        epochs, steps: length of the phase; if neither is given, the run's local_epochs or local_steps.
        lr: learning rate of round 1; None: the run's.
        plain: whether the steps are gradient descent at a constant rate, without lr_decay, momentum and weight_decay.
        lockstep: whether stacked clients may take these steps together; only used where the module allows lockstep.
        mask: name of the module's `Memory` or `Anchor` of masks. Where a parameter's mask is 0, its entries stay fixed;
            parameters without a mask are trained in whole.
    """

    name: str = "local"
    objective: str = "objective"
    trainable: Selector = NET
    epochs: int | None = None
    steps: int | None = None
    lr: float | None = None
    plain: bool = False
    lockstep: bool = True
    mask: str = ""


@dataclass(frozen=True, slots=True)
class Alternate:
    """Phases that alternate, either on each mini-batch (all phases use the same one) or by epoch.

    Args:
        phases: in their order; their own epochs and steps are ignored.
        every: "batch" or "epoch".
        epochs, steps: total length; if neither is given, the run's. With every="epoch" each phase gets this many
            epochs. With every="epoch" and a length in steps, each phase gets this many steps, one phase after another.
    """

    phases: tuple[Phase, ...]
    every: Literal["batch", "epoch"] = "batch"
    epochs: int | None = None
    steps: int | None = None


Schedule = Sequence[Phase | Alternate]


@contextmanager
def masked(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Undo at the end of the block what has changed where a mask is 0, whatever the optimiser does.

    Args:
        pairs: parameters and their masks.
    """
    before = [(parameter, mask, parameter.detach().clone()) for parameter, mask in pairs]
    yield
    with torch.no_grad():
        for parameter, mask, old in before:
            parameter.copy_(torch.where(mask != 0, parameter, old))


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of training in which each of `phases` takes one step on every mini-batch.

    Args:
        phases: in the order of their steps.
        epochs, steps: length of the stage; the other one is None.
    """

    phases: tuple[Phase, ...]
    epochs: int | None
    steps: int | None

    def batches(self, per_epoch: int) -> int:
        """Return the number of mini-batches of the stage, of which an epoch has so many."""
        limits = self.steps, None if self.epochs is None else self.epochs * per_epoch
        return min(limit for limit in limits if limit is not None)


def stages(schedule: Schedule, training: Training) -> tuple[Stage, ...]:
    """Return the stages of a schedule, with the run's length where the schedule gives none."""
    found: list[Stage] = []
    for item in schedule:
        epochs, steps = item.epochs, item.steps
        if epochs is None and steps is None:
            steps = training.local_steps
            epochs = None if steps is not None else training.local_epochs
        if isinstance(item, Phase):
            found.append(Stage((item,), epochs, steps))
        elif item.every == "batch":
            found.append(Stage(item.phases, epochs, steps))
        elif steps is not None:
            found.extend(Stage((phase,), None, steps) for phase in item.phases)
        else:
            found.extend(Stage((phase,), 1, None) for _ in range(epochs or 0) for phase in item.phases)
    return tuple(found)
