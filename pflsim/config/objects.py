"""Settings from Python: values become overrides, and classes, functions and data sets become targets."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from os import PathLike
from typing import Any

from pflsim.config.components import COMPONENTS
from pflsim.config.names import written
from pflsim.config.plain import dotted
from pflsim.errors import SettingsError

_objects: dict[str, Any] = {}


def object_of(target: str) -> Any:
    """Return the object that `target_of` named `target` in this process, or None."""
    return _objects.get(target)


def target_of(value: Any, name: str | None = None) -> str:
    """Return a dotted name for an object.

    Classes and functions that can be imported keep their own name, so that the command line can resume the run. Other
    objects, such as the classes of a notebook, have the name `__main__.NAME` in this process only; a later object of
    the same name replaces an earlier one.

    Args:
        value: the object.
        name: its name; default: that of the class or function.
    """
    qualified = name or getattr(value, "__qualname__", type(value).__name__)
    target = f"{getattr(value, '__module__', None)}.{qualified}"
    if name is None and _imported(target) is value:
        return target
    target = f"__main__.{qualified.rpartition('.')[2]}"
    _objects[target] = value
    return target


def _imported(target: str) -> Any:
    """Return what a target is on the import path of another process, or None."""
    module, _, name = target.rpartition(".")
    if module == "__main__" or "<locals>" in target:
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def overrides_of(settings: Mapping[str, Any], sweep: bool = False) -> list[str]:
    """Return settings as overrides of the command line.

    Args:
        settings: values by key; components may be objects (see `pflsim.run`), sections are mappings.
        sweep: a list has one value per run.

    Raises:
        SettingsError: an object is of no kind that the component takes, or two objects of a sweep have the same name.
    """
    found = []
    for key, value in settings.items():
        choices = value if sweep and isinstance(value, list) else [value]
        texts = [_component(key, choice) if key in COMPONENTS else _section(key, choice) for choice in choices]
        if len(texts) != len({tuple(text) for text in texts}):
            raise SettingsError(f"{key}: two values of the sweep are equal, or are objects of the same name")
        if len(choices) > 1 and any(len(text) > 1 for text in texts):
            raise SettingsError(f"{key}: a list of such values cannot be swept; call run for each of them")
        found += [",".join([texts[0][0], *(text[0].partition("=")[2] for text in texts[1:])]), *texts[0][1:]]
    return found


def _section(key: str, value: Any) -> list[str]:
    """Return the overrides of a setting, or of each setting of a section."""
    return [f"{name}={_written(item)}" for name, item in dotted({key: value}).items()]


def _written(value: Any) -> str:
    """Return a value as the command line expects it; quoted if it is text with special characters."""
    if isinstance(value, str | PathLike) and not re.fullmatch(r"[\w./:+-]+", text := str(value)):
        return "'" + re.sub(r"(\\*)'", r"\1\1\\'", text) + "'"
    return written(value)


def _component(key: str, value: Any) -> list[str]:
    """Return the overrides that choose a component."""
    if isinstance(value, str):
        return [f"{key}={value}"]
    if key == "method" and isinstance(value, tuple) and len(value) == 2:
        return [f"method={target_of(value[0])}", f"method.server={target_of(value[1])}"]
    if not callable(value):
        raise SettingsError(f"{key}={type(value).__name__}: expected a name, a class or a function")
    return [f"{key}={target_of(value)}"]
