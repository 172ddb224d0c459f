"""A cluster that is running already: joined for some runs, and left running."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from types import TracebackType

import ray

from pflsim.config.settings import Placement
from pflsim.errors import SettingsError
from ray_actors.cluster.local_ray import PREFIX
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.placement.layout import Layout, Supply
from ray_actors.placement.nodes import alive_nodes

REACHED_S = 5.0
"""How long a machine may take to answer at all; Ray itself would try for minutes."""


class JoinedRay:
    """The actors of runs on a cluster. Nothing is started there but actors, and these end with the last run.

    Args:
        address: auto, or HOST:PORT of its head.
    """

    def __init__(self, address: str):
        self.address = address
        self._pool = ActorPool()
        if not ray.is_initialized():
            join(address)

    def supply(self, placement: Placement) -> Supply:
        """What is free on the nodes that are alive; what the actors here hold would be given back."""
        return Supply.of(alive_nodes(self._pool.specs), placement.cpus)

    def pool(self, placement: Placement, layout: Layout, store_mb: int) -> ActorPool:
        """Where the actors of a run come from; those that it has no use for end."""
        del store_mb  # whoever started the cluster has decided that
        self._pool.patience_s = placement.wait_s
        self._pool.trim(layout.specs)
        return self._pool

    def clear(self, placement: Placement, store_mb: int) -> None:
        """Give back all that actors hold."""
        del placement, store_mb
        self.close()

    def close(self) -> None:
        """End the actors."""
        self._pool.close()

    def __enter__(self) -> JoinedRay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        finally:
            ray.shutdown()


def join(address: str) -> None:
    """Connect this process to the cluster at an address.

    Raises:
        SettingsError: there is none, or this machine is no part of it.
    """
    _check_reachable(address)
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of a call that is made again: nothing is unhandled here
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        why = " ".join(str(error).split())[:300]
        raise SettingsError(
            f"ray_address={address}: the cluster cannot be joined from here ({why}). Only a machine that is a node of "
            "it can join (ray start --address=HOST:PORT); from elsewhere: python launch.py submit ..."
        ) from error
    if _is_another_runs_own():
        ray.shutdown()
        raise SettingsError(
            f"ray_address={address}: what runs here is the Ray that another run has started for itself, and which ends "
            "with it; start a cluster with ray start --head, or leave ray_address out"
        )


def _is_another_runs_own() -> bool:
    """Whether this is a Ray that a run of pflsim has started for itself, and will end."""
    from ray._private.worker import global_worker

    node = global_worker.node
    return node is not None and any(part.startswith(PREFIX) for part in Path(node.get_session_dir_path()).parts)


def _check_reachable(address: str) -> None:
    if address == "auto":
        return  # Ray looks on this machine
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise SettingsError(f"ray_address={address}: expected auto or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED_S).close()
    except OSError as error:
        raise SettingsError(
            f"ray_address={address}: nothing answers there ({error.strerror or error}); start a cluster with ray start "
            "--head, or leave ray_address out for a Ray of this run's own"
        ) from error
