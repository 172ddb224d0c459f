"""Where a host computes: CPUs or GPUs, its share of a GPU, and the number of threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from pflsim.config.settings import Placement, Settings
from pflsim.errors import SettingsError
from pflsim.types import Precision


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
        why = f"but torch sees {seen} on this machine: set placement.gpus={seen}"
        raise SettingsError(f"placement.gpus={settings.placement.gpus}, {why}; with 0, clients train on the CPU")
    return "cuda:0"


ELEMENTWISE = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2"),
    *("sin", "sinh", "sqrt", "tan", "tanh"),
)
"""Functions that torch may compute with MKL's vector library."""


@cache
def _call_once() -> None:
    """Call each function of MKL's vector library on one thread.

    Where several threads make the first call, one of them may use a less exact kernel (pytorch/pytorch#188792).
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in ELEMENTWISE:
            getattr(torch, name)(one)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Set the number of torch's threads inside the block; the last bits of results depend on it."""
    if threads > 1:
        _call_once()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


PROCESSORS = Path("/proc/cpuinfo")
CONTEXT_MB = 500
"""MiB of GPU memory that CUDA takes in every process besides tensors (300 to 600, depending on GPU and version)."""


def precision_warnings(precision: Precision, device: str) -> tuple[str, ...]:
    """Return a warning if a precision is slower than float32 on this machine's processor, as far as Linux tells."""
    if precision != "bf16" or device != "cpu" or not PROCESSORS.exists() or "bf16" in PROCESSORS.read_text():
        return ()
    return ("precision=bf16 is slower than float32 on this processor, which lacks instructions for it: leave it out",)


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
    total = torch.cuda.get_device_properties(found).total_memory
    fraction = share - (CONTEXT_MB * 2**20 / total if share < 1 else 0.0)
    if fraction <= 0:
        raise RuntimeError(
            f"{share:g} of a GPU of {total / 2**30:.1f} GiB is less than the {CONTEXT_MB} MiB that CUDA takes in each "
            "process: lower placement.actors_per_gpu"
        )
    torch.cuda.set_per_process_memory_fraction(fraction, found)
    torch.cuda.reset_peak_memory_stats(found)  # an actor may have served another run
    # convolutions may choose another algorithm in each process otherwise, and sums of another order
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    fp32 = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = fp32
    for layers in ("conv", "rnn"):
        getattr(torch.backends.cudnn, layers).fp32_precision = fp32
    return found
