"""Decides whether clients and server compute on GPUs or on CPUs."""

from __future__ import annotations

from dataclasses import replace

import torch

from pflsim.config.settings import Placement, Settings
from pflsim.errors import SettingsError


def uses_gpus(placement: Placement) -> bool:
    """Return whether clients train on GPUs."""
    return placement.device == "cuda" or (placement.device == "auto" and placement.gpus > 0)


def visible_gpus() -> int:
    """Return how many GPUs torch sees on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def with_server_device(settings: Settings) -> Settings:
    """Replace `placement.server_device=auto` by cpu or cuda, which the run folder records.

    Raises:
        SettingsError: it is cuda, and this machine has no GPU.
    """
    placement = settings.placement
    wanted = placement.server_device == "cuda" or (placement.server_device == "auto" and uses_gpus(placement))
    device = "cuda" if wanted and visible_gpus() else "cpu"
    if placement.server_device == "cuda" and device == "cpu":
        raise SettingsError("placement.server_device=cuda, but torch sees no GPU on this machine: use auto or cpu")
    return replace(settings, placement=replace(placement, server_device=device))


def client_device(settings: Settings) -> str:
    """Return the torch device of the clients. Ray shows each actor the GPU that it may use as cuda:0.

    Raises:
        SettingsError: this machine has fewer GPUs than the settings request.
    """
    if not uses_gpus(settings.placement):
        return "cpu"
    requested, seen = settings.placement.gpus if settings.executor == "ray" else 1, visible_gpus()
    on_cluster = settings.ray_address is not None and settings.executor == "ray"  # there, each actor checks its node
    if requested > seen and not on_cluster:
        found = f"only {seen}" if seen else "no GPU"
        raise SettingsError(
            f"placement.gpus={settings.placement.gpus}, but torch sees {found} on this machine: set "
            f"placement.gpus={seen}" + ("" if seen else " to train on the CPU")
        )
    return "cuda:0"
