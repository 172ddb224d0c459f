"""Ray on this machine, kept running for the runs of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import ray

from pflsim.config.settings import Placement
from pflsim.run_folder.environment import usable_cpus
from ray_actors.cluster import launcher
from ray_actors.cluster.watch import Watch
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec
from ray_actors.placement.layout import Layout, Supply


class LocalRay(AbstractContextManager["LocalRay"]):
    """Starts Ray and its actors, and keeps them for the next run if it needs the same.

    If this process is connected to Ray already, that Ray is used and left running.

    Args:
        on_loss: called in another thread, with the reason, if the Ray that was started here ends by itself.
    """

    def __init__(self, on_loss: Callable[[str], None] = lambda reason: None):
        self._on_loss = on_loss
        self._watch: Watch | None = None
        self._external = ray.is_initialized()
        self._folder: Path | None = None
        self._size = (0, 0, 0)  # CPUs, GPUs, MiB of the object store
        self._specs: set[ActorSpec] | None = None
        self._pool = ActorPool()

    def supply(self, placement: Placement) -> Supply:
        """Return the resources for a run; the memory of running actors counts as free."""
        free_mb = psutil.virtual_memory().available / 2**20 + self._pool.started * ACTOR_MB
        if not self._external:
            return Supply(_cpus(placement), placement.gpus, free_mb)
        resources = ray.cluster_resources()
        return Supply(resources.get("CPU", 0.0), resources.get("GPU", 0.0), free_mb)

    def pool(self, placement: Placement, layout: Layout, store_mb: int) -> ActorPool:
        """Start Ray if necessary, with at least `store_mb` MiB of object store; return the pool for a run's actors."""
        self._start(placement, store_mb)
        specs = set(layout.specs)
        if specs != self._specs:
            self._pool.close()  # or they would hold the resources that the new actors need
            self._specs = specs
        elif len(specs) > 1:
            self._pool.trim(layout.specs)  # actors of one kind may all stay: as many as fit always fit
        return self._pool

    def _start(self, placement: Placement, store_mb: int) -> None:
        cpus, gpus = _cpus(placement), placement.gpus
        if self._external or (self._folder and self._size[:2] == (cpus, gpus) and self._size[2] >= store_mb):
            return
        self.close()
        self._folder, self._size = launcher.start(cpus, gpus, store_mb), (cpus, gpus, store_mb)
        self._watch = Watch(self._on_loss)

    def close(self) -> None:
        """End the actors, and the Ray that was started here."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._pool.close()
        self._specs = None
        if self._folder:
            launcher.stop(self._folder)
            self._folder = None

    def __exit__(self, *error: object) -> None:
        self.close()


def _cpus(placement: Placement) -> int:
    return placement.cpus or usable_cpus()
