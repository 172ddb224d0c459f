"""Part 3: the share of the memory, errors of the GPU, and memory in use after many rounds."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import psutil
import torch

from benchmarks.cases import ROOT
from benchmarks.gpu_check.runs import NETS, Check, bits, made, outcome, started, train_round
from lightning_modules.hosts.devices import claim_device
from lightning_modules.hosts.failures import Failure, FailurePolicy
from lightning_modules.hosts.inline import InlineExecutor
from pflsim.errors import in_words

OUT_OF_RANGE = """
import torch
from lightning_modules.hosts.failures import kind_of
x = torch.zeros(4, device={device!r})
try:
    x.index_select(0, torch.tensor([9], device={device!r}))
    torch.cuda.synchronize()
except Exception as error:
    print(type(error).__name__, kind_of(error))
"""


def checks(device: str) -> list[Check]:
    """Return the checks, the most important ones first."""
    return [
        ("share of the memory", partial(share, device)),
        ("retry after lack of memory", partial(retry, device)),
        ("assertion on the GPU", partial(device_assert, device)),
        *((f"memory over 20 rounds, {net}", partial(flat, device, net)) for net in NETS),
    ]


def share(device: str) -> str:
    """Allocate more than the share, which fails with advice, and then less, which works. A CPU has no share."""
    on_gpu = device != "cpu"
    total = torch.cuda.get_device_properties(0).total_memory if on_gpu else 2**62
    claim_device(device, 0.1)
    try:
        torch.empty(int(0.2 * total), dtype=torch.uint8, device=device)
        raise AssertionError("0.2 of the memory was allocated with a share of 0.1")
    except RuntimeError as error:
        words = in_words(error)
        torch.empty(total // 100 if on_gpu else 100, dtype=torch.uint8, device=device)
    finally:
        claim_device(device, 1.0)
    assert not on_gpu or "placement.actors_per_gpu" in words, words
    return words.partition(":")[0]


def retry(device: str) -> str:
    """Train with too little memory at first: on_client_error=retry ends with the states of a run with enough."""
    run = made("method=fedavg", "model=mlp", "model.hidden=[4096]", "lockstep_clients=6")
    expected = outcome(started(run, device), last=1)
    gc.collect()
    executor, failures = started(run, device, "retry(1)"), list[Failure]()
    policy, enough_memory = executor.failure_policy, too_little_memory(device, executor)

    def retried(failure: Failure, tries: int, before: Failure | None = None) -> tuple[int, ...]:
        failures.append(failure)
        enough_memory()
        return FailurePolicy.retry(policy, failure, tries, before)

    policy.retry = retried  # type: ignore[method-assign]
    try:
        found = outcome(executor, last=1)
    finally:
        enough_memory()
    assert failures, "there was enough memory"
    bits(found, expected)
    return str(failures[0].error).partition("\n")[0]


def too_little_memory(device: str, executor: InlineExecutor) -> Callable[[], None]:
    """Leave 1 MiB of the GPU's memory, or have the model raise the error on a CPU; return what ends this."""
    if device == "cpu":

        def refuse(*_: object) -> None:
            raise torch.OutOfMemoryError("out of memory, pretended")

        return executor.host.module.net.register_forward_pre_hook(refuse).remove
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    return partial(torch.cuda.set_per_process_memory_fraction, 1.0)


def device_assert(device: str) -> str:
    """Fail an assertion on the GPU in another process: after it, the process cannot continue and is replaced."""
    code = OUT_OF_RANGE.format(device=device)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    expected = "error" if device == "cpu" else "device"
    assert done.stdout.split()[-1:] == [expected], done.stdout + done.stderr[-300:]
    return done.stdout.strip()


def flat(device: str, net: str) -> str:
    """Compare the memory in use after 5 and after 20 rounds."""
    executor, found = started(made("method=pfedcfr", *NETS[net], "rounds=20"), device), []
    for number in range(1, 21):
        train_round(executor, number)
        if number in (5, 20):
            gc.collect()
            found.append(psutil.Process().memory_info().rss if device == "cpu" else torch.cuda.memory_allocated())
    # the system decides when a process returns memory, so a CPU's figure is only shown
    assert device == "cpu" or found[0] == found[1], found
    return ", ".join(f"{value / 2**20:.1f} MiB" for value in found)
