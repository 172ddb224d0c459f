"""From plain mappings, as a config file gives them, to `Settings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from pflsim.config.annotations import type_mismatch
from pflsim.config.components import COMPONENTS, check_part
from pflsim.config.names import nearest, shortened
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError

Schema = TypeVar("Schema")


def settings_from(config: Mapping[str, Any]) -> Settings:
    """Build the settings of a run; what is not given has its default, except the parts.

    Args:
        config: values by key, nested as `Settings` is.

    Raises:
        SettingsError: an unknown key, a value of another type, a part that is missing or does not fit its target.
    """
    settings = _fill(Settings, config, "")
    for part in COMPONENTS:
        node = getattr(settings, part)
        if not isinstance(node, Mapping) or not node:
            raise SettingsError(f"{part} is not chosen; give {part}=NAME (the names: python launch.py --help)")
        check_part(node, part)
    return settings


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= dotted(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _fill(schema: type[Schema], config: Mapping[str, Any], prefix: str) -> Schema:
    """An instance of a dataclass from a mapping, its nested dataclasses too."""
    known = {f.name: f for f in fields(schema)}  # type: ignore[arg-type]
    for name in config:
        if name not in known:
            raise SettingsError(f"{prefix}{name}: no such setting; {nearest(str(name), known)}")
    hints = get_type_hints(schema)
    values = {}
    for name, value in config.items():
        make = known[name].default_factory
        nested = isinstance(make, type) and is_dataclass(make)
        if nested and not isinstance(value, Mapping):
            raise SettingsError(f"{prefix}{name}={value!r}: expected {prefix}{name}.KEY=VALUE")
        expected = None if nested else type_mismatch(hints[name], value)
        if expected is not None and not (name == "seed" and type(value) is int):  # no count: it has bounds of its own
            raise SettingsError(f"{prefix}{name}={shortened(value)}: expected {expected}")
        values[name] = _fill(make, value, f"{prefix}{name}.") if nested else value  # type: ignore[arg-type]
    return schema(**values)
