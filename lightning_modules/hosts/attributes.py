"""Finds values that pass from one client to the next, or are lost in checkpoints, because no state holds them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from lightning_modules.anchor import Anchor
from pflsim.params import Selector
from pflsim.servers.base import ServerRule

if TYPE_CHECKING:
    from lightning_modules.base import ClientModule

IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), Selector)
PLAIN = (*IMMUTABLE, list, dict, set, Tensor, np.ndarray)
"""Values of a class that are compared; others, such as methods, are not."""
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that PyTorch may change."""
MAX_ARRAY_BYTES = 2**16
"""Larger arrays are compared by identity only."""
CLIENT_ADVICE = (
    "the next client would see the change: keep values of a client in parameters or persistent buffers, tensors of one "
    "round in an Anchor, and set constants in __init__"
)
SERVER_ADVICE = "a checkpoint would lose the change: keep it in the state that init and fuse return"


class StateError(RuntimeError):
    """An attribute outside the state has changed. A retry would not repeat the error, because the change remains."""


@contextmanager
def unchanged_attributes(owner: ClientModule | ServerRule[Any], buffers: bool = True) -> Iterator[None]:
    """Check that the block changes no attribute of a client's module or a server rule.

    Parameters, persistent buffers, anchors and attributes of the base classes are exempt. Of PyTorch's own modules,
    only new and deleted attributes are noticed.

    Args:
        owner: the module, with its submodules, or the rule.
        buffers: whether to check non-persistent buffers too.

    Raises:
        StateError: an attribute was set, deleted or changed in place; the message names it.
    """
    before = _fingerprints(owner, buffers)
    yield
    after = _fingerprints(owner, buffers)
    if after != before:
        names = sorted({f"self.{name}" for name, _ in before.items() ^ after.items()})
        advice = CLIENT_ADVICE if isinstance(owner, nn.Module) else SERVER_ADVICE
        raise StateError(f"{', '.join(names)} changed outside the state; {advice}")


def _fingerprints(owner: Any, buffers: bool, prefix: str = "") -> dict[str, object]:
    """Return by name a hashable value that is another one after a change of the attribute."""
    names = vars(owner).keys() - getattr(owner, "base_attributes", MODULE_ATTRIBUTES)
    if _is_library(type(owner)):
        found: dict[str, object] = dict.fromkeys((prefix + name for name in names), True)
    else:
        values = {**_class_values(type(owner)), **{name: vars(owner)[name] for name in names}}
        found = {prefix + name: _fingerprint(value) for name, value in values.items()}
    if isinstance(owner, nn.Module):
        for name in owner._non_persistent_buffers_set if buffers else ():
            found[prefix + name] = _fingerprint(owner._buffers[name])
        for name, child in owner._modules.items():
            if child is not None and not isinstance(child, Anchor):
                found |= _fingerprints(child, buffers, f"{prefix}{name}.")
    return found


def _is_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "torchvision", "transformers", "peft", "lightning", "builtins")


def _class_values(owner: type) -> dict[str, object]:
    """Return the values that a class and its bases define, which instances share."""
    pairs = [pair for cls in reversed(owner.__mro__) if not _is_library(cls) for pair in vars(cls).items()]
    return {name: value for name, value in pairs if isinstance(value, PLAIN) and not name.startswith("__")}


def _fingerprint(value: object) -> object:
    if isinstance(value, IMMUTABLE):
        return value
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except Exception:  # cannot be pickled: only replacing it is noticed
        return id(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Writes modules and large values as their identity."""

    def persistent_id(self, obj: object) -> object:
        if isinstance(obj, nn.Module | nn.Parameter):
            return id(obj)
        if isinstance(obj, Tensor):
            return id(obj), 0 if obj.is_inference() else obj._version
        return id(obj) if isinstance(obj, np.ndarray) and obj.nbytes > MAX_ARRAY_BYTES else None
