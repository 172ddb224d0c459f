"""Imports what runs need, while Ray starts."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from pflsim.config.settings import Settings

LIGHT = "lightning_modules.light"
"""Module that imports Lightning without packages that no run needs."""


def new_runner(first: Settings | None, own_process: bool) -> Any:
    """Return a `ray_actors.run.Runner`.

    Args:
        first: the settings of its first run, for the start of Ray; None: they are not known yet.
        own_process: whether this process does nothing but runs: then packages that no run needs are not imported.
    """
    if first is not None and own_process and first.progress in ("auto", "live") and sys.stdout.isatty():
        print("loading PyTorch", end="\r", flush=True)
    early = None
    local = first is not None and first.executor == "ray" and not first.ray_address
    if first is not None and local and not first.placement.gpus:  # GPUs are looked for by torch
        early = importlib.import_module("ray_actors.cluster.early").start_early(first)
    try:
        if own_process:
            importlib.import_module(LIGHT)
        return importlib.import_module("ray_actors.run").Runner(early)
    except BaseException:
        if early is not None:
            early.close()
        raise
