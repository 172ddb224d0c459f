"""How the clients of a run come to be on nodes of a cluster, which come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pflsim.config.settings import Placement
from pflsim.errors import RunError, SettingsError
from ray_actors.placement.layout import Layout, Supply, lay_out
from ray_actors.placement.nodes import LOOK_S, alive_ids


class Cluster(Protocol):
    """A cluster whose nodes come and go."""

    def supply(self, placement: Placement) -> Supply:
        """What is free on the nodes that are alive."""
        ...


class ElasticLayout:
    """Lays clients out on the nodes that there are.

    Args:
        cluster: has the nodes.
        work, stacks: of the run, see `lay_out`.
        placement: the settings.
    """

    def __init__(
        self, cluster: Cluster, work: Sequence[int], placement: Placement, stacks: Sequence[Sequence[int]] = ()
    ):
        self._cluster, self._work, self._placement, self._stacks = cluster, work, placement, stacks
        self._known: frozenset[str] = frozenset()

    def first(self) -> Layout:
        """The layout to begin with.

        Raises:
            SettingsError: the placement cannot be met, though nodes were waited for as long as the settings say.
        """
        return self._laid_out(self._placement.nodes or 0)

    def lay_out(self) -> Layout:
        """Another one, when nodes are gone.

        Raises:
            RunError: what is left is not enough.
        """
        try:
            return self._laid_out(0)
        except SettingsError as error:
            raise RunError(
                f"nodes have left the cluster, and what is left has no place for the clients: {error}"
            ) from None

    def grown(self, layout: Layout) -> Layout | None:
        """A layout on more actors, where nodes have joined since the last one and that is asked for."""
        if not self._placement.elastic:
            return None
        alive = alive_ids()
        joined, self._known = alive - self._known, alive
        if not joined:
            return None
        try:
            new = self._now()
        except SettingsError:
            return None  # it stays as it is
        return new if len(new.specs) > len(layout.specs) or _nodes(new) > _nodes(layout) else None

    def _laid_out(self, least: int) -> Layout:
        """A layout, as soon as so many nodes are there and it is possible."""

        def found() -> Layout:
            if (there := len(alive_ids())) < least:
                raise SettingsError(
                    f"placement.nodes={least}, but the cluster has {there}, also after {self._placement.wait_s:g} s: "
                    "ask for fewer, or wait longer (placement.wait_s)"
                )
            return self._now()

        self._known = alive_ids()  # one that joins from here on is looked at again
        return in_time(found, self._placement.wait_s)

    def _now(self) -> Layout:
        return lay_out(self._work, self._placement, self._cluster.supply(self._placement), self._stacks)


def _nodes(layout: Layout) -> int:
    return len({spec.node for spec in layout.specs})


def in_time(find: Callable[[], Layout], patience_s: float) -> Layout:
    """What is found as soon as it is: nodes may be on their way.

    Raises:
        SettingsError: the last one, when the time is over.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            return find()
        except SettingsError:
            if time.monotonic() >= until:
                raise
        time.sleep(LOOK_S)
