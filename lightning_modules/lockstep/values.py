"""Binding a module's parameters and buffers to a dictionary of tensors, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lightning_modules.base import ClientModule


def bind_state(module: ClientModule, values: dict[str, Tensor]) -> None:
    """Make tensors the module's parameters and buffers without copying; anchors not among them are cleared."""
    module.clear_anchors()
    parameters = dict(module.named_parameters())
    for name, value in values.items():
        if name in parameters:
            parameters[name].data = value
        else:
            owner, _, key = name.rpartition(".")
            submodule = module.get_submodule(owner)
            if key in submodule._buffers:
                submodule._buffers[key] = value
            else:  # of an anchor
                submodule.register_buffer(key, value, persistent=False)


@contextmanager
def restored_state(module: ClientModule) -> Iterator[None]:
    """Bind the module to its former tensors again at the end of the block.

    Otherwise it would keep rows of a stack. Their memory alignment affects the last bits of products, so results of the
    next client on this module would depend on who trained before.
    """
    module.clear_anchors()
    before = {name: value.detach() for name, value in _state(module).items()}
    try:
        yield
    finally:
        bind_state(module, before)


def clone_state(module: ClientModule) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers by name, with the same strides."""
    return {name: value.detach().clone() for name, value in _state(module).items()}


def _state(module: ClientModule) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
