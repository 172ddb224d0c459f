"""What the calling program may have set, and results depend on: the same in every run, and restored after it."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim.optimizer import _global_optimizer_post_hooks as optimizer_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_pre_hooks

from pflsim.errors import SettingsError
from pflsim.seeding import restored_generators

FLAGS = (
    *((f"{name}.fp32_precision", "ieee") for name in ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")),
    *((f"{name}.fp32_precision", "ieee") for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")),
    *(("cudnn.deterministic", True), ("cudnn.benchmark", False)),
)
"""Attributes of `torch.backends` and their values in a run."""
HOOKS: tuple[dict[int, Any], ...] = (
    *(getattr(modules, f"_global_{kind}_hooks") for kind in ("forward_pre", "forward", "backward_pre", "backward")),
    *(getattr(modules, f"_global_{kind}_registration_hooks") for kind in ("parameter", "buffer", "module")),
    *(optimizer_pre_hooks, optimizer_post_hooks),
)
"""PyTorch's hooks of all modules and optimisers; there are none in a run."""
_running = threading.RLock()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors of floating point of this type inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Set PyTorch to its defaults inside the block, and leave all global random generators as they were.

    Raises:
        SettingsError: another thread is inside such a block; the defaults are those of the whole process.
    """
    if not _running.acquire(blocking=False):
        raise SettingsError("another thread of this process runs pflsim: run one after the other, or in two processes")
    with ExitStack() as stack:
        stack.callback(_running.release)
        stack.enter_context(restored_generators())
        set_torch_defaults(stack)
        for mode in (torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_detect_anomaly(False)):
            stack.enter_context(mode)
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        for hooks in HOOKS:
            stack.callback(hooks.update, {**hooks})
            hooks.clear()
        yield


def set_torch_defaults(stack: ExitStack | None = None) -> None:
    """Set PyTorch to its defaults.

    Args:
        stack: restores at its end what was set before.

    Raises:
        SettingsError: a context has another default device.
    """
    warn_only, device = torch.is_deterministic_algorithms_warn_only_enabled(), torch.empty(0).device
    deterministic = torch.are_deterministic_algorithms_enabled()
    if device.type != "cpu":
        torch.set_default_device(None)
        if torch.empty(0).device.type != "cpu":
            raise SettingsError(f"a run inside `with torch.device({str(device)!r})` is not possible: call it outside")
        if stack:
            stack.callback(torch.set_default_device, device)
    calls: list[tuple[Any, Any, Any]] = [
        (torch.set_default_dtype, torch.get_default_dtype(), torch.float32),
        (torch.set_flush_denormal, not torch.tensor(1e-40, device="cpu").mul(1.0).item(), False),
        (lambda on: torch.use_deterministic_algorithms(on, warn_only=warn_only), deterministic, False),
    ]
    for name, value in FLAGS:
        backend, _, attribute = name.rpartition(".")
        owner = attrgetter(backend)(torch.backends)
        calls.append((lambda to, o=owner, a=attribute: setattr(o, a, to), getattr(owner, attribute), value))
    for put, before, value in calls:
        if before != value:  # `use_deterministic_algorithms` imports a compiler, which takes a second
            put(value)
            if stack:
                stack.callback(put, before)
