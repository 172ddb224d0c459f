"""Optimiser steps of a stack of clients, as torch.optim takes them for one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_modules.base import ClientModule
from lightning_modules.phases import Phase
from pflsim.types import Tensors

NORM_FLOOR = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm."""


class Update:
    """The optimiser of a phase.

    Args:
        module: has the settings.
        phase: the phase.

    Attributes:
        rate: the learning rate of this round.
        slots: names of the tensors that the optimiser keeps of each parameter.
        counts: whether it also keeps the number of steps.
        plain: whether a step only subtracts the gradients times the rate.
    """

    def __init__(self, module: ClientModule, phase: Phase):
        settings = module.training_settings
        self.rate = module.learning_rate(phase)
        self.momentum, self.weight_decay = module.momentum_and_decay(phase)
        choice = settings.optimizer
        self.name = "sgd" if phase.plain else choice.name
        self.options: Mapping[str, Any] = choice.options
        self.clip = None if phase.plain else settings.clip_grad_norm
        self.counts = self.name != "sgd"
        self.slots: tuple[str, ...] = ("mean", "square") if self.counts else ("momentum",) if self.momentum else ()
        self.plain = not (self.counts or self.momentum or self.weight_decay or self.clip is not None)

    def key(self) -> object:
        """Return what a recorded step depends on."""
        return self.name, self.rate, self.momentum, self.weight_decay, self.clip, str(dict(self.options))

    def state_of(self, parameters: Tensors, names: Sequence[str]) -> Tensors:
        """Return new optimiser state, zeros, by name; all tensors have the client axis first."""
        state = {f"{slot} {name}": torch.zeros_like(parameters[name]) for slot in self.slots for name in names}
        if self.counts and names:
            first = parameters[names[0]]
            state["steps"] = first.new_zeros(len(first), dtype=torch.float64)
        return state

    def apply(
        self, parameters: Tensors, gradients: Sequence[Tensor], state: Callable[[str], Tensor], stacked: bool
    ) -> None:
        """Take a step.

        Args:
            parameters: by name, [n, ...], or [...] of one client.
            gradients: in their order, of the same shapes.
            state: returns a tensor of the optimiser's state by name, [n, ...] or [...].
            stacked: whether tensors have the client axis.
        """
        with torch.no_grad():
            if self.clip is not None:
                gradients = clipped(gradients, self.clip, stacked)
            steps = state("steps").add_(1) if self.counts else None
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
                if self.name == "adamw":
                    parameter.mul_(1 - self.rate * self.weight_decay)
                elif self.weight_decay:
                    gradient = gradient.add(parameter, alpha=self.weight_decay)
                if steps is not None:
                    self._adam(parameter, gradient, state(f"mean {name}"), state(f"square {name}"), steps)
                    continue
                if self.momentum:
                    gradient = state(f"momentum {name}").mul_(self.momentum).add_(gradient)
                parameter.add_(gradient, alpha=-self.rate)

    def _adam(self, parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, steps: Tensor) -> None:
        beta1, beta2 = self.options.get("betas", (0.9, 0.999))
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        shape = steps.shape + (1,) * (parameter.dim() - steps.dim())
        size = (self.rate / (1 - beta1**steps)).to(parameter.dtype).view(shape)
        scale = (1 - beta2**steps).sqrt().to(parameter.dtype).view(shape)
        denominator = (square.sqrt() / scale).add_(self.options.get("eps", 1e-8))
        parameter.sub_(size * mean / denominator)


def clipped(gradients: Sequence[Tensor], limit: float, stacked: bool) -> list[Tensor]:
    """Scale the gradients of each client so that their common norm is at most `limit`."""
    first = 1 if stacked else 0
    squares = [gradient.reshape(*gradient.shape[:first], -1).square().sum(-1) for gradient in gradients]
    factor = (limit / (torch.stack(squares).sum(0).sqrt() + NORM_FLOOR)).clamp(max=1.0)
    return [gradient * factor.view(factor.shape + (1,) * (gradient.dim() - factor.dim())) for gradient in gradients]
