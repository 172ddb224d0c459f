"""A running cluster that a run joins and leaves running."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ray

from pflsim.config.names import program
from pflsim.config.settings import Placement
from pflsim.errors import SettingsError
from ray_actors.cluster.ray_folder import PREFIX
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.placement.layout import Layout, Supply
from ray_actors.placement.nodes import alive_nodes
from ray_actors.placement.ray_private import SafePathConfig, silence_notices

CONNECT_TIMEOUT_S = 5.0
"""How long the head may take to accept a connection; Ray itself would try for minutes."""


class JoinedRay(AbstractContextManager["JoinedRay"]):
    """Starts actors on a running cluster, and ends them after the last run.

    Args:
        address: auto, or HOST:PORT of the head.
    """

    def __init__(self, address: str):
        self.address = address
        self._pool = ActorPool()
        if not ray.is_initialized():
            join(address)

    def supply(self, placement: Placement) -> Supply:
        """Return the free resources of the nodes that are alive; those of this process's actors count as free."""
        return Supply.of(alive_nodes(self._pool.specs), placement.cpus)

    def pool(self, placement: Placement, layout: Layout) -> ActorPool:
        """End the actors that a run does not need; return the pool for its actors."""
        self._pool.wait_s = placement.wait_s
        self._pool.trim(layout.specs)
        return self._pool

    def close(self) -> None:
        """End all actors."""
        self._pool.close()

    def __exit__(self, *error: object) -> None:
        try:
            self.close()
        finally:
            ray.shutdown()


def join(address: str) -> None:
    """Connect this process to a cluster.

    Raises:
        SettingsError: there is no cluster at this address, or this machine is not a node of it.
    """
    _check_reachable(address)
    silence_notices()
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # pflsim repeats failed calls and reports them itself
    try:
        context: Any = ray.init(address=address, logging_level=logging.WARNING, job_config=SafePathConfig())
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        advice = f"run ray start --address=HOST:PORT here, or submit the run as a job: {program()} submit ..."
        raise SettingsError(
            f"ray_address={address}: only a node of the cluster can join it ({reason}): {advice}"
        ) from error
    if belongs_to_a_run(context.address_info["session_dir"]):
        ray.shutdown()
        why = "this Ray belongs to another run and ends with it"
        raise SettingsError(f"ray_address={address}: {why}; start a cluster with ray start --head")


def belongs_to_a_run(session_dir: str | None) -> bool:
    """Return whether a run of pflsim has started the Ray with this session folder for itself."""
    return any(part.startswith(PREFIX) for part in Path(session_dir or "").parts)


def _check_reachable(address: str) -> None:
    if address == "auto":
        return  # Ray looks on this machine
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise SettingsError(f"ray_address={address}: expected auto or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        why = f"nothing answers there ({error.strerror or error})"
        raise SettingsError(f"ray_address={address}: {why}; start a cluster with ray start --head") from error
