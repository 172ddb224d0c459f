"""A host's share of a GPU."""

from __future__ import annotations

import torch

CONTEXT_MB = 500
"""MiB of GPU memory that CUDA takes in every process besides tensors (300 to 600, depending on GPU and version)."""


def claim_device(device: str, share: float) -> torch.device:
    """Return a device, and limit this process to its share of the device's memory if it is a GPU.

    Args:
        device: "cpu", or one of the GPUs that this process sees.
        share: of the GPU's memory, in (0, 1], including what CUDA takes.

    Raises:
        RuntimeError: torch sees no GPU, or the share leaves no memory for tensors.
    """
    found = torch.device(device)
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"placement.gpus asks for a GPU, but torch sees none on node {_node()} (torch without CUDA, or no driver): "
            "set placement.gpus=0, or use nodes with a GPU"
        )
    total = torch.cuda.get_device_properties(found).total_memory
    torch.cuda.set_per_process_memory_fraction(memory_fraction(share, total), found)
    return found


def memory_fraction(share: float, total: int) -> float:
    """Return the fraction of a GPU's memory for tensors.

    Args:
        share: the process's share of the memory.
        total: the GPU's memory in bytes.

    Raises:
        RuntimeError: no memory is left for tensors.
    """
    left = share - (CONTEXT_MB * 2**20 / total if share < 1 else 0.0)
    if left <= 0:
        raise RuntimeError(
            f"{share:g} of a GPU of {total / 2**30:.1f} GiB is less than the {CONTEXT_MB} MiB that CUDA takes in each "
            "process: lower placement.actors_per_gpu"
        )
    return left


def _node() -> str:
    from ray.util import get_node_ip_address  # a run without Ray does not import it

    return get_node_ip_address()
