"""The types of a run's components."""

from __future__ import annotations

from typing import Protocol

from lightning_modules.base import ClientModule
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.servers.base import ServerRule


class MakesClient(Protocol):
    """Type of a method's `client` with its settings bound."""

    def __call__(self, net: Net, training: Training, /) -> ClientModule:
        """Return a client's module."""
        ...


class MakesRule(Protocol):
    """Type of a method's `server` with its settings bound."""

    def __call__(self) -> ServerRule:
        """Return the server rule."""
        ...


class MakesNet(Protocol):
    """Type of a model with its settings bound."""

    def __call__(self, input_shape: tuple[int, ...], num_classes: int, /) -> Net:
        """Return a network."""
        ...
