"""A host's share of a GPU."""

from __future__ import annotations

import platform

import torch

from pflsim.types import Precision

CONTEXT_MB = 500
"""MiB of GPU memory that CUDA takes in every process besides tensors (300 to 600, depending on GPU and version)."""


def claim_device(device: str, share: float, precision: Precision = "ieee") -> torch.device:
    """Return a device, and if it is a GPU, limit this process to its share of the memory and set torch's flags.

    Args:
        device: "cpu", or one of the GPUs that this process sees.
        share: of the GPU's memory, in (0, 1], including what CUDA takes.
        precision: of convolutions and matrix products.

    Raises:
        RuntimeError: torch sees no GPU, or the share leaves no memory for tensors.
    """
    found = torch.device(device)
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"placement.gpus asks for a GPU, but torch sees none on node {platform.node()} (torch without CUDA, or no "
            "driver): set placement.gpus=0, or use nodes with a GPU"
        )
    total = torch.cuda.get_device_properties(found).total_memory
    torch.cuda.set_per_process_memory_fraction(memory_fraction(share, total), found)
    torch.cuda.reset_peak_memory_stats(found)  # an actor may have served another run
    # convolutions may choose another algorithm in each process otherwise, and sums of another order
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    fp32 = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = fp32
    torch.backends.cudnn.conv.fp32_precision = fp32  # type: ignore[attr-defined]
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
