"""Actors that died: which errors say so, what they say, and waiting where it was for want of memory."""

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
THRESHOLD = "RAY_memory_usage_threshold", 0.95
"""Where Ray is told from which share of the memory in use it kills, and that share where it is not told."""
SPARE = 0.01
"""Of the memory: so much less than that share must be in use for another actor to be started."""
PAUSE_S, PATIENCE_S = 1.0, 60.0
LOOK_S = 2.0
"""How often to look whether something is still there that has not answered."""
VERDICT_S = 120.0
"""How long an actor may be out of reach, neither alive nor dead as far as Ray knows (a dead node takes about 15 s)."""


def out_of_memory(error: Exception) -> bool:
    """Whether Ray killed the actor because memory ran out."""
    text = " ".join(str(error).split()).partition("Some common")[0]
    return isinstance(error, OutOfMemoryError) or "running low on memory" in text or "OOM" in text


def how_it_died(error: Exception) -> str:
    """The last message of a dead actor, in one line, without Ray's advice."""
    text = " ".join(str(error).split())
    if out_of_memory(error):
        used = re.search(r"was ([\d.]+ ?GB used / [\d.]+ ?GB)", text)
        return "Ray killed it, for the node was out of memory" + (f" ({used[1]})" if used else "")
    found = re.search(r"Worker exit detail: (.*?)(?: Some common causes| Last | The process|$)", text)
    if found is None:
        return text[:300]
    if "connection error code 2" in found[1]:
        return "its process ended without a word, as when it is killed (kill -9, or by the system when memory is out)"
    return found[1][:300]


def wait_for_memory(error: Exception) -> None:
    """Where an actor was killed for want of memory, wait until there is some, but not for ever: another one that is
    started at once would be killed as well.
    """
    if not out_of_memory(error):
        return
    name, usual = THRESHOLD
    limit, until = float(os.environ.get(name, usual)) - SPARE, time.monotonic() + PATIENCE_S
    time.sleep(PAUSE_S)
    while psutil.virtual_memory().percent / 100 > limit and time.monotonic() < until:
        time.sleep(PAUSE_S)


def verdict(actor: Any, error: Exception) -> bool:
    """Whether an actor that could not be reached is alive after all, once Ray knows.

    Args:
        actor: the actor.
        error: what came of calling it.
    """
    until = time.monotonic() + VERDICT_S
    while isinstance(error, ActorUnavailableError) and time.monotonic() < until:
        try:
            ray.get(actor.pid.remote(), timeout=LOOK_S)
            return True
        except ActorUnavailableError:
            time.sleep(LOOK_S / 4)
        except GetTimeoutError:  # it can be reached, and is at work
            return True
        except DEATHS:
            return False
    return False


def check_lost(error: Exception) -> None:
    """Raises `Displaced` where an error says that an object is lost, which a call was given or has made."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ObjectLostError):
        raise NodeLost("what was on a node that left the cluster is missing") from None
