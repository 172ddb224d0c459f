"""Actors that died: which errors say so, what they say, and waiting where it was for want of memory."""

from __future__ import annotations

import os
import re
import time

import psutil
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError

DEATHS = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)
THRESHOLD = "RAY_memory_usage_threshold", 0.95
"""Where Ray is told from which share of the memory in use it kills, and that share where it is not told."""
SPARE = 0.01
"""Of the memory: so much less than that share must be in use for another actor to be started."""
PAUSE_S, PATIENCE_S = 1.0, 60.0


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
