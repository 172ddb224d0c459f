"""Which clients train in lockstep: a matter of the run, not of its placement."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from lightning_modules.base import ClientModule
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError

TAKING_PART = {"cpu": 5, "cuda": 64}
"""Clients of a stack that take part in a round, by device: a CPU's cache holds few, a GPU wants many. On a CPU a model
with convolutions is a stack of its own: several together gain nothing, and one keeps its channels last in memory."""


def stacks(
    settings: Settings, method: str, module: ClientModule, device: str, sizes: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Divide the clients that train into stacks, those with as much to do together.

    Args:
        settings: of the run; `lockstep`, `lockstep_clients` and `fraction` count.
        method: its name, for errors.
        module: a client's.
        device: torch device of the computation.
        sizes: training examples of every client that trains.

    Returns:
        The stacks, each with the largest shard first; none where clients train one by one.

    Raises:
        SettingsError: lockstep=true, and the method cannot.
    """
    wanted = str(settings.lockstep).lower()
    if wanted == "true" and not module.lockstep:
        raise SettingsError(f"lockstep=true: {method} trains its clients one by one; leave lockstep out")
    if wanted == "false" or not module.lockstep:
        return ()
    made: list[tuple[int, ...]] = []
    kinds = len(settings.model.get("variants") or [None])
    for kind in range(kinds):
        clients = sorted(range(kind, len(sizes), kinds), key=lambda c: (-sizes[c], c))
        made += _even(clients, settings.lockstep_clients or _size(settings, module, device))
    return tuple(made)


def _size(settings: Settings, module: nn.Module, device: str) -> int:
    if device == "cpu" and any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules()):
        return 1
    return math.ceil(TAKING_PART[device.partition(":")[0]] / settings.fraction)


def _even(clients: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Neighbours in as few parts as there must be, of sizes that differ by one at most."""
    count = -(-len(clients) // most)
    ends = [len(clients) * at // count for at in range(count + 1)] if count else [0]
    return [tuple(clients[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
