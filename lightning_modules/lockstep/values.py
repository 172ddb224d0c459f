"""All parameters and buffers of a module as a dictionary, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lightning_modules.base import ClientModule


def bind_state(module: ClientModule, values: dict[str, Tensor]) -> None:
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


@contextmanager
def restored_state(module: ClientModule) -> Iterator[None]:
    """What a module comes to wear inside the block is off again at its end, and what it was made with is back.

    Otherwise it would be left with rows of a stack, wherever in memory these begin. The last bits of a product depend
    on that, so that those of the next client judged here would depend on who had trained here before.
    """
    module.clear_anchors()
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = {name: value.detach() for name, value in named.items()}
    try:
        yield
    finally:
        bind_state(module, own)


def clone_state(module: ClientModule) -> dict[str, Tensor]:
    """Copies of all parameters and buffers of a module, by name; strides stay as they are."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.detach().clone() for name, value in named.items()}
