"""The names of a run's components in records and messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pflsim.config.settings import Settings
from pflsim.errors import SettingsError


def component_name(settings: Settings, group: str) -> str:
    """Return the name of a component: its option on the command line, or the name in its target.

    Raises:
        SettingsError: the component is not set.
    """
    if group in settings.names:
        return settings.names[group]
    node: Mapping[str, Any] = getattr(settings, group)
    target = (node.get("client") or {}).get("_target_") if group == "method" else node.get("_target_")
    if not target:
        raise SettingsError(f"{group} is not set; give {group}=NAME")
    module, _, last = str(target).rpartition(".")
    return module.rpartition(".")[2] if group in ("method", "model") or last == "load" else last


def describe(settings: Settings, group: str) -> str:
    """Return a component with its settings: `dirichlet(alpha=0.1)`."""
    node: Mapping[str, Any] = getattr(settings, group)
    chosen = ", ".join(f"{key}={value}" for key, value in node.items() if not key.startswith("_"))
    name = component_name(settings, group)
    return f"{name}({chosen})" if chosen else name


def record_names(settings: Settings) -> dict[str, str]:
    """Return the names of partition, split and shift for partition.json; given rows need no split."""
    split = "" if component_name(settings, "partition") == "explicit" else describe(settings, "split")
    shift = "" if component_name(settings, "shift") == "none" else describe(settings, "shift")
    return {"partition_name": describe(settings, "partition"), "split_name": split, "shift_name": shift}
