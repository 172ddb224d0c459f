"""Selecting tensors of a module, grouping them into fusion units, and copying them out and in."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from pflsim.errors import SettingsError
from pflsim.types import Tensors, Unit

UnitKind = Literal["module", "tensor", "model"]
Threshold = Annotated[int, Ge(0)] | Annotated[float, Ge(0), Le(1)] | Literal["body"]
"""A number of units, a fraction of them, or all units before the classifier."""


@dataclass(frozen=True, slots=True)
class Selector:
    """Selects tensors of a module by the submodule they belong to.

    Args:
        under: names of submodules; all tensors below them are selected. "" is the module itself, () selects nothing.
        norms: "with" selects all, "without" excludes normalisation layers, "only" selects normalisation layers alone.
    """

    under: tuple[str, ...]
    norms: Literal["with", "without", "only"] = "with"

    def parameters(self, module: nn.Module) -> tuple[str, ...]:
        """Return the state_dict keys of the selected parameters, in the module's order."""
        return self.pick(module, [name for name, _ in module.named_parameters()])

    def buffers(self, module: nn.Module) -> tuple[str, ...]:
        """Return the state_dict keys of the selected persistent floating point buffers, without integer counters."""
        names = [name for name, buffer in module.named_buffers() if buffer.is_floating_point()]
        saved = module.state_dict(keep_vars=True) if names else {}
        return self.pick(module, [name for name in names if name in saved])

    def pick(self, module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
        """Return those of some state_dict keys that are selected."""
        if self.norms != "with":
            norms = {name for name, part in module.named_modules() if is_norm(part)}
            names = [n for n in names if (n.rpartition(".")[0] in norms) == (self.norms == "only")]
        return tuple(n for n in names if any(p == "" or n == p or n.startswith(p + ".") for p in self.under))


NOTHING = Selector(())
NET = Selector(("net",))
BODY = Selector(("net.body",))
HEAD = Selector(("net.head",))
COMMON = Selector(("common",))


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation layer, by its class."""
    return isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm)


def units(module: nn.Module, parameters: Sequence[str], buffers: Sequence[str], by: UnitKind) -> tuple[Unit, ...]:
    """Group the named tensors of a module into fusion units, in the module's own order.

    Args:
        module: the module the names belong to.
        parameters: names of its parameters that are fused.
        buffers: names of its buffers that are fused. A buffer joins the unit of its module's parameters; if its module
            has none (a norm layer that is not affine), it joins the unit before.
        by: "module" (a module's weight, bias and buffers form a unit), "tensor" (every parameter is a unit; a norm
            layer's buffers join its weight) or "model" (one unit).
    """
    if by == "model":
        return (Unit("model", tuple(parameters), tuple(buffers)),) if parameters else ()

    def unit_of(parameter: str) -> str:
        return parameter.rpartition(".")[0] if by == "module" else parameter

    grouped: dict[str, tuple[list[str], list[str]]] = {}
    for name in parameters:
        grouped.setdefault(unit_of(name), ([], []))[0].append(name)
    home = _homes(module, parameters, buffers)
    for name in buffers:
        if name in home:
            grouped[unit_of(home[name])][1].append(name)
    return tuple(Unit(name, tuple(own), tuple(joined)) for name, (own, joined) in grouped.items())


def _homes(module: nn.Module, parameters: Sequence[str], buffers: Sequence[str]) -> dict[str, str]:
    """Return for each buffer the parameter whose unit it joins."""
    first: dict[str, str] = {}
    for name in parameters:
        first.setdefault(name.rpartition(".")[0], name)
    homes: dict[str, str] = {}
    last = next(iter(parameters), None)
    for name in module.state_dict(keep_vars=True):
        if name in first.values():
            last = name
        elif name in buffers and last is not None:
            homes[name] = first.get(name.rpartition(".")[0], last)
    return homes


def resolve_threshold(threshold: Threshold, layout: Sequence[Unit], name: str = "method.r") -> int:
    """Return the number r of units before a fusion threshold.

    Args:
        threshold: a count 0..L, a fraction of L between 0.0 and 1.0 (rounded half up), or "body" (all units before
            the classifier).
        layout: the L fusion units.
        name: the setting's name, for errors.

    Raises:
        SettingsError: the threshold is beyond the model's depth.
    """
    depth = len(layout)
    if threshold == "body":
        return next((i for i, unit in enumerate(layout) if any(k.startswith("net.head.") for k in unit.keys)), depth)
    if isinstance(threshold, float):
        return int(threshold * depth + 0.5)
    if threshold > depth:
        names = ", ".join(unit.name for unit in layout[:8]) + (", ..." if depth > 8 else "")
        raise SettingsError(
            f"{name}: threshold {threshold} is beyond the model's depth: it has {depth} fusion units ({names}); "
            f"give 0 to {depth}"
        )
    return threshold


def second_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter with several names, such as tied embeddings, by each of the others."""
    names: dict[nn.Parameter, str] = {}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first for name, value in every if (first := names.setdefault(value, name)) != name}


def snapshot(tensors: Tensors) -> dict[str, Tensor]:
    """Copy tensors to the CPU, detached from their graph.

    Tensors leave a module only by this function, and a server uses it for what it keeps of a message.
    """
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def padded(value: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of the shape of another one that begins with these entries along every axis, and then has 0."""
    if value.shape == like.shape:
        return value
    full = value.new_zeros(like.shape)
    full[tuple(map(slice, value.shape))] = value
    return full


def load_state(module: nn.Module, state: Tensors) -> None:
    """Load a whole state that `snapshot` returned, with the versions of the module's layers, which it does not have."""
    versioned = OrderedDict(state)
    versioned._metadata = module.state_dict(keep_vars=True)._metadata  # type: ignore[attr-defined]
    module.load_state_dict(versioned)


def load(module: nn.Module, tensors: Tensors) -> None:
    """Copy values into a module's tensors in place; tensors that are not named keep their values.

    Raises:
        KeyError: the module has no tensor of that name.
        ValueError: the shapes differ.
    """
    own = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in tensors.items():
            target = own[name]
            if target.shape != value.shape:
                shapes = f"the module has shape {tuple(target.shape)}, the message {tuple(value.shape)}"
                raise ValueError(f"{name}: {shapes}")
            target.copy_(value)


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the type of a module's parameters, PyTorch's default type for one without any."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.get_default_dtype())
