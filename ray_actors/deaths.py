"""Actors that died: which errors say so, and what they say."""

from __future__ import annotations

import re

from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError

DEATHS = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)


def how_it_died(error: Exception) -> str:
    """The last message of a dead actor, in one line, without Ray's advice."""
    text = " ".join(str(error).split())
    said = text.partition("Some common")[0]
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text or "OOM" in said:
        return "Ray killed it, for the node was out of memory"
    found = re.search(r"Worker exit detail: (.*?)(?: Some common causes| Last | The process|$)", text)
    if found is None:
        return text[:300]
    if "connection error code 2" in found[1]:
        return "its process ended without a word, as when it is killed (kill -9, or by the system when memory is out)"
    return found[1][:300]
