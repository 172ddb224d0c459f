"""Dead actors: which errors report one, why it died, and waiting for free memory before it is replaced."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import psutil
import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from pflsim.engine.execution import NodeLost

DEATHS = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)
MEMORY_THRESHOLD = "RAY_memory_usage_threshold", 0.95
"""The environment variable for the share of memory in use at which Ray kills workers, and its default."""
MEMORY_MARGIN = 0.01
"""An actor is restarted when the share of memory in use is below the threshold by this margin."""
MEMORY_POLL_S, MEMORY_TIMEOUT_S = 1.0, 60.0
POLL_INTERVAL_S = 2.0
"""How often the driver checks nodes and actors that have not answered."""
UNREACHABLE_TIMEOUT_S = 120.0
"""How long an actor may be unreachable while Ray does not know whether it is dead (about 15 s for a dead node)."""


def out_of_memory(error: Exception) -> bool:
    """Return whether Ray killed the actor because the node's memory ran out."""
    text = " ".join(str(error).split()).partition("Some common")[0]
    return isinstance(error, OutOfMemoryError) or "running low on memory" in text or "OOM" in text


def how_it_died(error: Exception) -> str:
    """Return why an actor died, in one line without Ray's advice."""
    text = " ".join(str(error).split())
    if out_of_memory(error):
        used = re.search(r"was ([\d.]+ ?GB used / [\d.]+ ?GB)", text)
        return "Ray killed it because the node was out of memory" + (f" ({used[1]})" if used else "")
    found = re.search(r"Worker exit detail: (.*?)(?: Some common causes| Last | The process|$)", text)
    if found is None:
        return text[:300]
    if "connection error code 2" in found[1]:
        return "its process was killed (kill -9, or by the operating system because memory ran out)"
    return found[1][:300]


def wait_for_memory(error: Exception) -> None:
    """Wait until memory is free, up to a minute, if an actor was killed because memory ran out.

    A new actor would be killed at once otherwise.
    """
    if not out_of_memory(error):
        return
    limit, until = float(os.environ.get(*MEMORY_THRESHOLD)) - MEMORY_MARGIN, time.monotonic() + MEMORY_TIMEOUT_S
    time.sleep(MEMORY_POLL_S)
    while psutil.virtual_memory().percent / 100 > limit and time.monotonic() < until:
        time.sleep(MEMORY_POLL_S)


def is_alive(actor: Any, error: Exception) -> bool:
    """Return whether an actor is alive after a call failed; waits until Ray knows.

    Args:
        actor: the actor.
        error: of the call.
    """
    until = time.monotonic() + UNREACHABLE_TIMEOUT_S
    while isinstance(error, ActorUnavailableError) and time.monotonic() < until:
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=POLL_INTERVAL_S)
            return True
        except ActorUnavailableError:
            time.sleep(POLL_INTERVAL_S / 4)
        except GetTimeoutError:  # it is busy
            return True
        except DEATHS:
            return False
    return False


def check_lost(error: Exception) -> None:
    """Raise `NodeLost` if the error is that an argument or a result of a call is lost."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ObjectLostError):
        raise NodeLost("objects on a node that left the cluster are lost") from None
