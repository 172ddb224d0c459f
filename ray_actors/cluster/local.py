"""Starting and leaving Ray on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import psutil
import ray

from pflsim.config.settings import Placement
from ray_actors.cluster import local_ray
from ray_actors.cluster.watch import Watch
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec
from ray_actors.placement.layout import Layout, Supply


class LocalRay:
    """A Ray of our own on this machine with its actors, kept for the runs of a sweep as long as they need the same.

    One that this process is already connected to is used as it is and left running.

    Args:
        lost: is told, in another thread, when the Ray that was started here has ended by itself.
    """

    def __init__(self, lost: Callable[[str], None] = lambda reason: None):
        self._lost = lost
        self._watch: Watch | None = None
        self._theirs = ray.is_initialized()
        self._size: tuple[int, int, int] | None = None  # CPUs, GPUs, MiB of store of the Ray that we started
        self._folder: Path | None = None
        self._request: set[ActorSpec] | None = None
        self._pool = ActorPool()

    def supply(self, placement: Placement) -> Supply:
        """What there will be to place on; the memory of actors that are up already counts as free."""
        free = psutil.virtual_memory().available / 2**20 + self._pool.started * ACTOR_MB
        if not self._theirs:
            return Supply(_cpus(placement), placement.gpus, free)
        resources = ray.cluster_resources()
        return Supply(resources.get("CPU", 0.0), resources.get("GPU", 0.0), free)

    def pool(self, placement: Placement, layout: Layout, store_mb: int) -> ActorPool:
        """Where the actors of a run come from; Ray is up then, with declared CPUs and GPUs and at least this store."""
        self._fit(_cpus(placement), placement.gpus, store_mb)
        request = set(layout.specs)
        if request != self._request:
            self._pool.close()  # actors that ask for something else would hold what the new ones need
            self._request = request
        elif len(request) > 1:
            self._pool.trim(layout.specs)  # of one kind as many as ever fit may stay, of several not
        return self._pool

    def clear(self, placement: Placement, store_mb: int) -> None:
        """Bring Ray up with nothing on it."""
        self._fit(_cpus(placement), placement.gpus, store_mb)
        self._pool.close()
        self._request = None

    def _fit(self, cpus: int, gpus: int, store_mb: int) -> None:
        if self._theirs or (self._size and self._size[:2] == (cpus, gpus) and self._size[2] >= store_mb):
            return
        self.close()
        self._folder = local_ray.start(cpus, gpus, store_mb)
        self._size = cpus, gpus, store_mb
        self._watch = Watch(self._lost)

    def close(self) -> None:
        """End the actors, and the Ray that we started."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._pool.close()
        self._request = None
        if self._folder:
            local_ray.stop(self._folder)
            self._size = self._folder = None

    def __enter__(self) -> LocalRay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cpus(placement: Placement) -> int:
    """As told, or the CPUs that this process may use."""
    return placement.cpus or len(os.sched_getaffinity(0))
