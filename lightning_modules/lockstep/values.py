"""All parameters and buffers of a module as a dictionary, and back."""

from __future__ import annotations

from torch import Tensor

from lightning_modules.base import ClientModule


def wear(module: ClientModule, values: dict[str, Tensor]) -> None:
    """Make tensors the module's parameters and buffers, without copying; what it held for a round goes."""
    module.clear_anchors()
    parameters = dict(module.named_parameters())
    for name, value in values.items():
        if name in parameters:
            parameters[name].data = value
        else:
            owner, _, key = name.rpartition(".")
            part = module.get_submodule(owner)
            if key in part._buffers:
                part._buffers[key] = value
            else:  # of an anchor
                part.register_buffer(key, value, persistent=False)


def worn(module: ClientModule) -> dict[str, Tensor]:
    """Copies of all parameters and buffers of a module, by name; strides stay as they are."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.detach().clone() for name, value in named.items()}
