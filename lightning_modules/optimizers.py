"""The optimisers of local training."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim

from pflsim.config.components import resolve
from pflsim.errors import SettingsError

STACKABLE = {"sgd": set[str](), "adam": {"betas", "eps"}, "adamw": {"betas", "eps"}}
"""Optimisers that lockstep can compute for a stack of clients, and the options that it knows."""


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """The setting `optimizer`.

    Args:
        name: sgd, adam, adamw, or the dotted name of a subclass of `torch.optim.Optimizer`.
        options: its arguments besides the parameters, lr, momentum and weight_decay.
        keep: whether a client's optimiser state is kept from round to round.
        parts: by what the learning rate of a part of the net is multiplied, by pattern as in `freeze`; the last counts.
        no_decay: whether parameters with one axis, as biases and those of normalisation layers, have no weight decay.
    """

    name: str = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    keep: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)
    no_decay: bool = False

    @property
    def stackable(self) -> bool:
        """Whether lockstep can compute its steps."""
        grouped = self.keep or self.parts or self.no_decay
        return not grouped and self.name in STACKABLE and set(self.options) <= STACKABLE[self.name]

    def groups(self, parameters: Mapping[str, Tensor], factors: Mapping[str, float], lr: float) -> list[dict[str, Any]]:
        """Return the parameter groups of an optimiser; one without settings if all parameters are alike.

        Args:
            parameters: by name.
            factors: of the learning rate, by name.
            lr: the learning rate.
        """
        found: dict[object, dict[str, Any]] = {}
        for name, parameter in parameters.items():
            own: dict[str, Any] = {"lr": factors[name] * lr} if name in factors else {}
            own |= {"weight_decay": 0.0} if self.no_decay and parameter.dim() < 2 else {}
            found.setdefault(str(own), {"params": [], **own})["params"].append(parameter)
        return [*found.values()]

    def make(
        self, parameters: Sequence[Any], lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> optim.Optimizer:
        """Return the optimiser of some parameters, or of groups of them.

        Raises:
            SettingsError: the class does not exist, or does not take an option, momentum or weight decay.
        """
        kind, given = optimizer_class(self.name), {"lr": lr, **self.options}
        for name in ("lr", "momentum", "weight_decay"):
            if name in self.options:
                raise SettingsError(f"optimizer.options.{name}: set {name}={self.options[name]} of the run instead")
        taken = inspect.signature(kind).parameters
        for name, value in (("momentum", momentum), ("weight_decay", weight_decay)):
            if name in taken:
                given[name] = value
            elif value:
                raise SettingsError(f"{name}={value}: optimizer={self.name} has no such argument")
        if unknown := sorted(set(given) - set(taken)):
            choices = ", ".join(name for name in taken if name not in ("params", "lr", "momentum", "weight_decay"))
            raise SettingsError(
                f"optimizer.options.{unknown[0]}: optimizer={self.name} has no such argument; it has {choices}"
            )
        if self.name in STACKABLE and "fused" not in given:
            given["fused"] = self.name == "sgd"
        try:
            return kind(parameters, **given)  # type: ignore[call-arg]
        except Exception as error:  # of a wrong option
            raise SettingsError(f"optimizer={self.name} with {dict(self.options)}: {error}") from error


def optimizer_class(name: str) -> type[optim.Optimizer]:
    """Return the class of an optimiser.

    Raises:
        SettingsError: there is no such class, or it cannot do the steps of local training.
    """
    short = {"sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW}
    if name in short:
        return short[name]
    if "." not in name:
        raise SettingsError(f"optimizer={name}: choose {', '.join(short)}, or a dotted name")
    found = resolve(name, key="optimizer")
    if not (isinstance(found, type) and issubclass(found, optim.Optimizer)):
        raise SettingsError(f"optimizer={name} is not a subclass of torch.optim.Optimizer")
    _, *taken = inspect.signature(found.step).parameters.values()
    needs = [f"a {p.name}" for p in taken if p.default is p.empty and not p.kind.name.startswith("VAR")]
    needs += ["sparse gradients"] * issubclass(found, optim.SparseAdam)
    if needs:
        raise SettingsError(f"optimizer={name} needs {needs[0]}, which a run does not have: choose {', '.join(short)}")
    return found


class KeptOptimizers(nn.Module):
    """The optimiser states of a client between rounds, as buffers (`optimizer.keep=true`).

    Args:
        optimizers: a new optimiser for each phase; their parameters keep their values.

    Raises:
        SettingsError: an optimiser's state is not made of tensors only.
    """

    used: Tensor

    def __init__(self, optimizers: Sequence[optim.Optimizer]):
        super().__init__()
        self.register_buffer("used", torch.zeros(len(optimizers), dtype=torch.bool))
        for at, optimizer in enumerate(optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            before = [p.detach().clone() for p in parameters]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            try:
                optimizer.step()  # creates the state
            except Exception as error:
                raise SettingsError(f"optimizer={type(optimizer).__name__}: {error}") from error
            for number, (parameter, value) in enumerate(zip(parameters, before, strict=True)):
                parameter.grad, parameter.data = None, value
                for slot, state in optimizer.state[parameter].items():
                    if isinstance(state, Tensor):
                        self.register_buffer(f"{at}_{number}_{slot}", torch.zeros_like(state))
                    elif state is not None:
                        kind = type(optimizer).__name__
                        raise SettingsError(f"optimizer.keep=true: the state {slot!r} of {kind} is not a tensor")

    def restore(self, at: int, optimizer: optim.Optimizer) -> None:
        """Give an optimiser the state of phase number `at`; none before its first round."""
        if at >= len(self.used):
            raise SettingsError(
                "optimizer.keep=true: the schedule has other phases than in round 1; define kept_phases in the method"
            )
        if not self.used[at]:
            return
        for parameter, slot, value in self._slots(at, optimizer):
            optimizer.state[parameter][slot] = value.clone()

    def store(self, at: int, optimizer: optim.Optimizer) -> None:
        """Keep an optimiser's state as that of phase number `at`; parameters without gradients keep theirs."""
        for parameter, slot, value in self._slots(at, optimizer):
            if slot in (state := optimizer.state[parameter]):
                value.copy_(state[slot])
                self.used[at] = True

    def _slots(self, at: int, optimizer: optim.Optimizer) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Yield the parameters of phase number `at` with the names and kept values of their states."""
        for name, value in self.named_buffers():
            phase, *place = name.split("_", 2)
            if place and int(phase) == at:
                parameters = [each for group in optimizer.param_groups for each in group["params"]]
                yield parameters[int(place[0])], place[1], value
