"""The parts of a run: what their targets must be, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError
from pflsim.servers.base import ServerRule


class MakesClient(Protocol):
    """What a method's `client` is, its settings filled in."""

    def __call__(self, net: Net, training: Training, /) -> ClientModule:
        """A client's module."""
        ...


class MakesRule(Protocol):
    """What a method's `server` is, its settings filled in."""

    def __call__(self) -> ServerRule:
        """The server rule."""
        ...


class MakesNet(Protocol):
    """What a model is, its settings filled in."""

    def __call__(self, input_shape: tuple[int, ...], num_classes: int, /) -> Net:
        """A network."""
        ...


def part_name(settings: Settings, group: str) -> str:
    """What a part is called: its option on the command line, or else the name in its target.

    Raises:
        SettingsError: the part is missing.
    """
    if group in settings.names:
        return settings.names[group]
    node: Mapping[str, Any] = getattr(settings, group)
    target = (node.get("client") or {}).get("_target_") if group == "method" else node.get("_target_")
    if not target:
        raise SettingsError(f"{group} is not set: choose one")
    module, _, last = str(target).rpartition(".")
    return module.rpartition(".")[2] if group in ("method", "model") or last == "load" else last


def describe(settings: Settings, group: str) -> str:
    """A part with its settings, for the record: `dirichlet(alpha=0.1)`."""
    node: Mapping[str, Any] = getattr(settings, group)
    chosen = ", ".join(f"{key}={value}" for key, value in node.items() if not key.startswith("_"))
    return f"{part_name(settings, group)}({chosen})" if chosen else part_name(settings, group)
