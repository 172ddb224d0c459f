"""Objects of a Python program as targets: classes of a notebook, and functions that return its data."""

from __future__ import annotations

import importlib
import re
from typing import Any

PREFIX = "__main__."
"""Begins the target of an object that other processes cannot import."""
_objects: dict[str, Any] = {}


def object_of(target: str) -> Any:
    """Return the object that `target_of` named `target` in this process, or None."""
    return _objects.get(target)


def target_of(value: Any) -> str:
    """Return a dotted name for a class or function.

    Those that can be imported keep their own name, so that the command line can resume the run. Others, such as the
    classes of a notebook, have the name `__main__.NAME` in this process only; a later object of the same name replaces
    an earlier one.
    """
    target = f"{value.__module__}.{value.__qualname__}"
    if _imported(target) is value:
        return target
    target = PREFIX + re.sub(r"\W", "", value.__qualname__.rpartition(".")[2])
    _objects[target] = value
    return target


def _imported(target: str) -> Any:
    """Return what a target is on the import path of another process, or None."""
    module, _, name = target.rpartition(".")
    if f"{module}." == PREFIX or "<locals>" in target:
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
