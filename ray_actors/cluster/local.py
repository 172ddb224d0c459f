"""Ray on this machine, kept running for the runs of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import ray

from pflsim.config.settings import Placement
from ray_actors.cluster import launcher
from ray_actors.cluster.early import EarlyRay, RaySize
from ray_actors.cluster.watch import Watch
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec
from ray_actors.placement.layout import Layout, Supply


class LocalRay(AbstractContextManager["LocalRay"]):
    """Starts Ray and its actors, and keeps them for the next run if it needs the same.

    If this process is connected to Ray already, that Ray is used and left running.

    Args:
        on_loss: called in another thread, with the reason, if the Ray that was started here ends by itself.
        early: is starting already.
    """

    def __init__(self, on_loss: Callable[[str], None] = lambda reason: None, early: EarlyRay | None = None):
        self._on_loss, self._early = on_loss, early
        self._watch: Watch | None = None
        self._external = early is None and ray.is_initialized()
        self._folder: Path | None = None
        self._size: RaySize | None = None
        self._specs: set[ActorSpec] | None = None
        self._pool = ActorPool()

    def supply(self, placement: Placement) -> Supply:
        """Return the resources for a run; the memory of running actors counts as free."""
        free_mb = psutil.virtual_memory().available / 2**20 + self._pool.started * ACTOR_MB
        if not self._external:
            return Supply(RaySize.of(placement).cpus, placement.gpus, free_mb)
        resources = ray.cluster_resources()
        return Supply(resources.get("CPU", 0.0), resources.get("GPU", 0.0), free_mb)

    def pool(self, placement: Placement, layout: Layout) -> ActorPool:
        """Start Ray if necessary; return the pool for a run's actors."""
        self._start(RaySize.of(placement))
        specs = set(layout.specs)
        if specs != self._specs:
            self._pool.close()  # or they would hold the resources that the new actors need
            self._specs = specs
        elif len(specs) > 1:
            self._pool.trim(layout.specs)  # actors of one kind may all stay: as many as fit always fit
        return self._pool

    def _start(self, size: RaySize) -> None:
        if self._external or size == self._size:
            return
        if self._early is not None and self._early.size == size:
            self._folder, self._pool, self._specs = self._early.folder(), self._early.pool, {*self._early.specs}
        else:
            self.close()
            self._folder = size.start()
        self._size, self._watch = size, Watch(self._on_loss)

    def close(self) -> None:
        """End the actors, and the Ray that was started here."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._pool.close()
        self._specs = None
        if self._early is not None:
            self._early.close()
        elif self._folder:
            launcher.stop(self._folder)
        self._early = self._folder = self._size = None

    def __exit__(self, *error: object) -> None:
        self.close()
