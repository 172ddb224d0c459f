"""Whether a run is on GPUs, and on CPUs instead where they are missing and the settings allow that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from pflsim.config.settings import Placement, Settings


def on_gpus(placement: Placement) -> bool:
    """Whether clients train on GPUs, all or most of them."""
    return placement.device == "cuda" or (placement.device == "auto" and placement.gpus > 0)


def gpus_here() -> int:
    """How many GPUs torch sees on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def on_cpus(settings: Settings) -> Settings:
    """The same run with everything on CPUs."""
    return replace(settings, placement=replace(settings.placement, gpus=0, cpu_actors=0, device="cpu"))


def fallen_back(settings: Settings, found: Callable[[], float]) -> tuple[Settings, str]:
    """The settings that a new run has, decided once, before anything follows from its device.

    They are what its folder records, so that it shows where the clients trained, and what it is taken up with.

    Args:
        settings: as given.
        found: how many GPUs there are; asked only where it matters.

    Returns:
        The settings, and what is to be said of them; empty: they are as given.
    """
    asked = settings.placement.gpus
    if not settings.placement.cpu_fallback or not asked or (there := found()) >= asked:
        return settings, ""
    words = f"placement.gpus={asked}, but there are {there:g} GPUs"
    return on_cpus(settings), f"{words}: all clients train on CPUs (placement.cpu_fallback=true)"
