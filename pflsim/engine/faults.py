"""Faults of a run: how many actors were replaced, and which clients failed in a round."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pflsim.types import Fault


class FaultRecorder:
    """Counts replaced actors, and records the clients that fail until a round takes them into its record.

    Attributes:
        restarts: the number of actors that were replaced so far.
        on_restart: called with this number whenever it grows.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self.on_restart: Callable[[int], None] = lambda restarts: None
        self._faults: dict[int, Fault] = {}

    def count_restart(self) -> None:
        """Count one replaced actor."""
        self.restarts += 1
        self.on_restart(self.restarts)

    def add(self, clients: Iterable[int], kind: Fault) -> None:
        """Record that these clients failed."""
        self._faults.update(dict.fromkeys(clients, kind))

    def take(self) -> dict[int, Fault]:
        """Return the faults since the last call, by client."""
        taken, self._faults = self._faults, {}
        return taken
