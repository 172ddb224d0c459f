"""Starting and leaving Ray on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import ray

from pflsim.settings import Placement
from ray_actors.placement import Supply


def supply(placement: Placement) -> Supply:
    """What there will be to place on: what a running Ray has, or else what ours will be started with."""
    free = psutil.virtual_memory().available / 2**20
    if not ray.is_initialized():
        return Supply(_cpus(placement), placement.gpus, free)
    resources = ray.cluster_resources()
    return Supply(resources.get("CPU", 0.0), resources.get("GPU", 0.0), free)


def _cpus(placement: Placement) -> int:
    """As told, or the CPUs that this process may use."""
    return placement.cpus or len(os.sched_getaffinity(0))


@contextmanager
def local_ray(placement: Placement, store_mb: int) -> Iterator[None]:
    """A Ray of our own on this machine for the block, with declared CPUs and GPUs.

    One that this process is already connected to is used as it is and left running.
    """
    mine = not ray.is_initialized()
    if mine:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Ray switches token authentication on by itself, which is right, and says so each time, which is noise.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        ray.init(
            address="local",
            _node_ip_address="127.0.0.1",  # nothing outside this machine can reach it
            num_cpus=_cpus(placement),
            num_gpus=placement.gpus,
            object_store_memory=store_mb * 2**20,
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
    try:
        yield
    finally:
        if mine:
            ray.shutdown()
