"""Starts Ray while this process still imports torch and prepares the run."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from pflsim.config.settings import Placement, Settings
from pflsim.records.environment import usable_cpus
from ray_actors.cluster import launcher
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.placement.actor_spec import ActorSpec, share

SHARED_MEMORY = Path("/dev/shm")
SHARE_OF_SHARED_MEMORY = 0.9
"""Part of the free shared memory that Ray's object store may take: above it, Ray would use a slow file."""


@dataclass(frozen=True, slots=True)
class RaySize:
    """What Ray is started with: CPUs, GPUs, and MiB of the object store; None: a third of the free memory."""

    cpus: int
    gpus: int
    store_mb: int | None

    @classmethod
    def of(cls, placement: Placement) -> RaySize:
        """Return the size that a run needs."""
        return cls(placement.cpus or usable_cpus(), placement.gpus, placement.object_store_mb)

    def start(self) -> Path:
        """Start Ray and return the folder of its files. Ray takes memory only for objects that exist."""
        return launcher.start(self.cpus, self.gpus, self.store_mb or free_mb())


class EarlyRay:
    """Starts Ray and actors in a thread. The actors import torch, too.

    Args:
        placement: of the first run.
        actors: the number of client actors that it probably needs.
    """

    def __init__(self, placement: Placement, actors: int):
        self.size, self.pool = RaySize.of(placement), ActorPool()
        self.specs = [ActorSpec(share(self.size.cpus, actors), 0.0)] * actors
        self._folder: Future[Path] = Future()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="start-ray", daemon=True).start()

    def _run(self) -> None:
        try:
            self._folder.set_result(self._start())
        except BaseException as error:
            self._folder.set_exception(error)
        self._closed.wait()  # Linux ends the processes of Ray with the thread that has started them

    def _start(self) -> Path:
        folder = self.size.start()
        try:
            self.pool.hosts(self.specs)
            self.pool.server()
        except BaseException:
            launcher.stop(folder)
            raise
        return folder

    def folder(self) -> Path:
        """Wait until Ray runs, and return the folder of its files; raises the error of its start."""
        return self._folder.result()

    def close(self) -> None:
        """Wait until Ray runs, and stop it."""
        with suppress(Exception):
            launcher.stop(self.folder())
        self._closed.set()


def start_early(settings: Settings) -> EarlyRay | None:
    """Start Ray for a run on this machine; None if this process is connected to a Ray already."""
    if ray.is_initialized():
        return None
    placement = settings.placement
    return EarlyRay(placement, placement.actors or min(settings.clients, RaySize.of(placement).cpus))


def free_mb() -> int:
    """Return a third of the free memory in MiB, limited by the free shared memory."""
    free = psutil.virtual_memory().available / 3
    if SHARED_MEMORY.is_dir():
        free = min(free, psutil.disk_usage(str(SHARED_MEMORY)).free * SHARE_OF_SHARED_MEMORY)
    return int(max(128, free / 2**20))
