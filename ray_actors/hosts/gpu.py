"""A host's part of a GPU."""

from __future__ import annotations

import torch

CONTEXT_MB = 500
"""Memory of a GPU that CUDA itself takes in every process (300 to 600 MiB, by card and version), beside tensors."""


def claimed(device: str, share: float) -> torch.device:
    """A device to work on, of whose memory this process will take no more than its share.

    Args:
        device: cpu, or a GPU of those that this process is shown.
        share: of a GPU's memory, in (0, 1]; what CUDA itself takes of it is set aside.

    Raises:
        RuntimeError: torch sees no GPU here, or the share leaves nothing for tensors.
    """
    found = torch.device(device)
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"placement.gpus asks for a GPU, but torch sees none on node {_node()} (a torch without CUDA, or "
            "no driver): set placement.gpus=0, or use nodes that have one"
        )
    total = torch.cuda.get_device_properties(found).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction(share, total), found)
    return found


def fraction(share: float, total: int) -> float:
    """The part of a GPU's memory that tensors may take.

    Args:
        share: of all the memory, for the whole process.
        total: bytes of the GPU.

    Raises:
        RuntimeError: nothing is left.
    """
    left = share - (CONTEXT_MB * 2**20 / total if share < 1 else 0.0)
    if left <= 0:
        raise RuntimeError(
            f"{share:g} of a GPU of {total / 2**30:.1f} GiB is less than the {CONTEXT_MB} MiB that CUDA takes in each "
            "process: lower placement.actors_per_gpu"
        )
    return left


def _node() -> str:
    from ray.util import get_node_ip_address  # here, since a run without Ray does not load it

    return get_node_ip_address()
