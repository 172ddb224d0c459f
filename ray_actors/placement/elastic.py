"""Assigns clients to the nodes of a cluster while nodes join and leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pflsim.config.settings import Placement
from pflsim.errors import RunError, SettingsError
from ray_actors.placement.layout import Layout, Supply, lay_out
from ray_actors.placement.nodes import POLL_INTERVAL_S, alive_ids


@dataclass(slots=True)
class ElasticLayout:
    """Computes layouts for the nodes that are alive.

    Args:
        supply: returns the free resources of the nodes that are alive.
        work, stacks: see `lay_out`.
        placement: the placement settings.
    """

    supply: Callable[[Placement], Supply]
    work: Sequence[int]
    placement: Placement
    stacks: Sequence[Sequence[int]] = ()
    _known: frozenset[str] = field(init=False, default=frozenset())

    def first(self) -> Layout:
        """Return the layout to start with; wait for nodes for up to `placement.wait_s` seconds.

        Raises:
            SettingsError: the placement cannot be met.
        """
        return self._wait(self.placement.nodes or 0)

    def lay_out(self) -> Layout:
        """Return a new layout after nodes have left; wait for nodes for up to `placement.wait_s` seconds.

        Raises:
            RunError: the remaining nodes are not enough.
        """
        try:
            return self._wait(0)
        except SettingsError as error:
            raise RunError(f"nodes have left and the others cannot hold the clients: {error}") from None

    def grown(self, layout: Layout) -> Layout | None:
        """Return a layout on more actors or nodes if nodes have joined and `placement.elastic` is set, else None."""
        if not self.placement.elastic:
            return None
        alive = alive_ids()
        joined, self._known = alive - self._known, alive
        if not joined:
            return None
        try:
            new = self._compute()
        except SettingsError:
            return None
        return new if len(new.specs) > len(layout.specs) or _nodes(new) > _nodes(layout) else None

    def _wait(self, min_nodes: int) -> Layout:
        """Return the layout as soon as it can be computed; raises the last `SettingsError` after the timeout."""
        deadline = time.monotonic() + self.placement.wait_s
        self._known = alive_ids()  # before computing, so that `grown` notices a node that joins meanwhile
        while True:
            try:
                if (alive := len(alive_ids())) < min_nodes:
                    found = f"the cluster has {alive} nodes after placement.wait_s={self.placement.wait_s:g}"
                    raise SettingsError(f"placement.nodes={min_nodes}, but {found}: request fewer, or wait longer")
                return self._compute()
            except SettingsError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(POLL_INTERVAL_S)

    def _compute(self) -> Layout:
        return lay_out(self.work, self.placement, self.supply(self.placement), self.stacks)


def _nodes(layout: Layout) -> int:
    return len({spec.node for spec in layout.specs})
