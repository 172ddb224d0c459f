"""Frozen parameters: constants of the user's model, which are neither trained nor sent nor part of a client's state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pflsim.config.names import nearest
from pflsim.errors import SettingsError
from pflsim.records.trace import write_tensors
from pflsim.types import Tensors


class Frozen(Tensor):
    """A frozen parameter. Modules hold it as a non-persistent buffer, and copies of a module share it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as of nn.Parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Frozen:
        """Return the tensor itself."""
        return self


def freeze(net: nn.Module, patterns: Sequence[str] = ()) -> None:
    """Freeze the parameters of a net that have `requires_grad=False` or that a pattern names.

    Args:
        net: changed in place.
        patterns: of parameters or modules, with wildcards: "body", "body.layer?.*", "*.bias"; or by the names in
            the module of a user, "layer1".

    Raises:
        SettingsError: a pattern names nothing.
    """
    parameters = dict(net.named_parameters(remove_duplicate=False))
    for name in named(net, patterns, parameters, "freeze"):
        parameters[name].requires_grad_(False)
    constants = {p: p.detach().as_subclass(Frozen) for p in parameters.values() if not p.requires_grad}
    for name, parameter in parameters.items():
        if parameter in constants:
            owner, _, key = name.rpartition(".")
            del net.get_submodule(owner)._parameters[key]
            net.get_submodule(owner).register_buffer(key, constants[parameter], persistent=False)


def named(net: nn.Module, patterns: Sequence[str], names: Collection[str], setting: str) -> set[str]:
    """Return those of some tensors of a net that a pattern names.

    Args:
        net: has the tensors.
        patterns: see `freeze`.
        names: of the tensors.
        setting: the name of the setting that has the patterns, for errors.

    Raises:
        SettingsError: a pattern names nothing.
    """
    own = getattr(net, "name_of", str)  # of a key, in the module of a user
    found = set[str]()
    for pattern in patterns:
        chosen = {
            name
            for name in names
            if any(fnmatchcase(each, form) for each in (name, own(name)) for form in (pattern, f"{pattern}.*"))
        }
        if not chosen:
            known = [*names, *(name for name, _ in net.named_modules() if name)]
            raise SettingsError(f"{setting}={pattern}: the model has no such parameters; {nearest(pattern, known)}")
        found |= chosen
    return found


def frozen(module: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters by name; each tensor once."""
    return {name: value for name, value in module.named_buffers() if isinstance(value, Frozen)}


def thaw(module: nn.Module) -> None:
    """Turn frozen parameters back into parameters with `requires_grad=False`."""
    made: dict[Tensor, nn.Parameter] = {}
    for part in module.modules():
        for key, value in [*part._buffers.items()]:
            if isinstance(value, Frozen):
                del part._buffers[key]
                plain = nn.Parameter(value.as_subclass(Tensor), requires_grad=False)
                part.register_parameter(key, made.setdefault(value, plain))  # tied ones are one parameter again


def save_frozen(folder: Path, variants: Iterable[nn.Module]) -> None:
    """Write the frozen parameters of each variant of the model to a run folder, or compare them with those there.

    Raises:
        SettingsError: the run has others, because its model or its weights have changed.
    """
    for variant, own in enumerate(map(frozen, variants)):
        if (path := _path(folder, variant)).exists():
            saved = _read(path)
            common = own.keys() & saved.keys()
            if differing := [n for n in {**own, **saved} if n not in common or not torch.equal(own[n], saved[n])]:
                raise SettingsError(f"the run cannot resume: {differing[0]} is frozen and differs from that in {path}")
        elif own:
            write_tensors(path, own, {"variant": str(variant)})


def load_frozen(folder: Path, variant: int, net: nn.Module) -> None:
    """Read the frozen parameters of a run, if it has any, into a net of the same variant of the model."""
    if (path := _path(folder, variant)).exists():
        own = frozen(net)
        for name, value in _read(path).items():
            own[name].copy_(value)


def _path(folder: Path, variant: int) -> Path:
    return folder / f"frozen_{variant}.safetensors"


def _read(path: Path) -> Tensors:
    from safetensors.torch import load_file

    return load_file(path)
