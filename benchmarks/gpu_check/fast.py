"""Part 2: seconds of a round: the loop, stacks, CUDA graphs, a plain PyTorch loop, and a process for each client."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial

import torch
from torch import nn

from benchmarks.cases import COMMON
from benchmarks.gpu_check.runs import (
    Check,
    Skipped,
    collected_warnings,
    evaluate,
    made,
    seconds_of,
    started,
    train_round,
)
from benchmarks.gpu_check.workers import workers
from benchmarks.speed.plain import Loader, PlainLoop, State, average, train_client
from lightning_modules.hosts.devices import claim_device
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.lockstep.stack_training import Lockstep
from lightning_modules.prepare import PreparedRun
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask

NETS = {"mlp": "model=mlp", "cnn": "model=cnn"}
AIMS = {("mlp", 100): 0.12, ("cnn", 100): 0.5}
"""Seconds of a round on an H100."""
WAYS = {"graph": ("lockstep=true", True), "stack": ("lockstep=true", False), "loop": ("lockstep=false", False)}
"""The settings of each way, and whether its steps are replayed."""


def checks(device: str) -> list[Check]:
    """Return the checks, the most important ones first."""
    few, many = (2, 4) if device == "cpu" else (20, 100)
    cases = [(net, count) for count in (many, few) for net in NETS]
    slow = [(net, few, "loop") for net in NETS]
    ways = [(net, count, way) for net, count in cases for way in WAYS if way != "loop"]
    return [
        *((f"{net}, {count} clients, {way}", partial(ours, device, net, count, way)) for net, count, way in ways),
        ("mlp, waits", partial(waits, device)),
        ("mlp, kernels of a step", partial(kernels, device)),
        *((f"{net}, {many} clients, busy", partial(busy, device, net, many)) for net in NETS),
        *((f"{net}, {count} clients, plain loop", partial(plain, device, net, count)) for net, count in cases),
        *((f"{net}, {few} clients, a process each", partial(processes, device, net, few)) for net in NETS),
        *((f"{net}, {count} clients, {way}", partial(ours, device, net, count, way)) for net, count, way in slow),
    ]


@cache
def workload(device: str, net: str, clients: int, *more: str) -> PreparedRun:
    """Return the run of a net in `make bench`, with random images."""
    examples = 700 if device == "cpu" else 70_000
    gpus = "placement.gpus=0" if device == "cpu" else "placement.gpus=1"  # decides which clients form a stack
    return made(*COMMON, NETS[net], f"clients={clients}", f"data.examples={examples}", "local_epochs=1", gpus, *more)


def warmed(device: str, run: PreparedRun, replay: bool) -> InlineExecutor:
    """Return an executor that has trained and evaluated a round."""
    executor = started(run, device)
    executor.host.locksteps = {v: Lockstep(m, replay) for v, m in executor.host.modules.items()}
    train_round(executor, 1)
    evaluate(executor)
    return executor


def ours(device: str, net: str, clients: int, way: str) -> str:
    """Measure rounds of the inline executor."""
    setting, replay = WAYS[way]
    rounds = (2,) if way == "loop" else (2, 3, 4)
    with collected_warnings() as problems:
        executor = warmed(device, workload(device, net, clients, setting), replay)
        trained = min(seconds_of(partial(train_round, executor, number), device) for number in rounds)
        evaluated = min(seconds_of(partial(evaluate, executor), device) for _ in rounds)
    assert not problems, problems[0]
    aim = f", aim {AIMS[net, clients]}" if way == "graph" and (net, clients) in AIMS else ""
    return f"{trained + evaluated:.3f} s{aim} (train and fuse {trained:.3f}, evaluate {evaluated:.3f})"


def plain(device: str, net: str, clients: int) -> str:
    """Measure a round of the plain loop after one client's training."""
    loop = PlainLoop(workload(device, net, clients, "lockstep=false"), device)
    train_client(deepcopy(loop.server), loop.clients[0][0], loop.training, loop.smallest)
    done, _ = loop.round()
    trained = done["train"] + done["fuse"]
    return f"train and fuse {trained:.3f} s, evaluate {done['evaluate']:.3f}"


def processes(device: str, net: str, clients: int) -> str:
    """Measure a round in which every client is a process that trains a plain loop."""
    loop = PlainLoop(workload(device, net, clients, "lockstep=false"))
    given = [(loop.server, train, loop.training, loop.smallest, device, clients) for train, _ in loop.clients]
    with workers(plain_client, given) as ask:

        def one_round() -> None:
            states = ask([loop.server.state_dict()] * clients)
            loop.server.load_state_dict(average(states, loop.sizes))

        one_round()
        seconds = min(seconds_of(one_round, "cpu") for _ in range(2))
    return f"train and fuse {seconds:.3f} s"


def plain_client(
    model: nn.Module, loader: Loader, training: Training, smallest: int, device: str, clients: int
) -> Callable[[State], State]:
    """Return a function that trains the model from a state, and returns its new state on the CPU."""
    torch.set_num_threads(1)
    claim_device(device, 1 / clients)
    model.to(device)

    def train(state: State) -> State:
        model.load_state_dict(state)
        train_client(model, loader, training, smallest)
        return {name: value.cpu() for name, value in model.state_dict().items()}

    return train


def kernels(device: str) -> str:
    """Count what the CPU starts in a step of a stack: kernels and graphs on a GPU, operations on a CPU."""
    kind = torch.profiler.ProfilerActivity.CPU if device == "cpu" else torch.profiler.ProfilerActivity.CUDA
    words = ("aten::",) if device == "cpu" else ("LaunchKernel", "GraphLaunch")
    found = []
    for name, replay in (("in turn", False), ("replayed", True)):
        run = made("method=fedavg", "model=mlp", "partition=iid", "lockstep_clients=6", "local_steps=64")
        executor = warmed(device, run, replay)
        sent = executor.send(range(6))
        with torch.profiler.profile(activities=[kind]) as profile:
            executor.run(TrainTask(2), sent)
        counted = sum(event.count for event in profile.key_averages() if any(word in event.key for word in words))
        assert counted, "the profiler saw none"
        found.append(f"{counted / 64:.1f} {name}")
    return ", ".join(found)


def busy(device: str, net: str, clients: int) -> str:
    """Measure for which share of a round's training the GPU computes, and which kernels take the time."""
    if device == "cpu":
        raise Skipped("needs a GPU")
    executor = warmed(device, workload(device, net, clients, "lockstep=true"), replay=True)
    wall = seconds_of(partial(train_round, executor, 2), device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds_of(partial(train_round, executor, 3), device)
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events) / 1e6
    top = "; ".join(f"{e.self_device_time_total / 1e6:.3f} {e.count} {e.key[:40]}" for e in events[:6])
    return f"{total:.3f} of {wall:.3f} s: {top}"


def waits(device: str) -> str:
    """Count how often the CPU waits for the GPU: as often for 20 epochs as for one."""
    found = []
    for epochs in (1, 20):
        run = made("method=fedavg", "model=mlp", "partition=iid", "lockstep_clients=6", f"local_epochs={epochs}")
        executor = warmed(device, run, replay=True)
        with warnings.catch_warnings(record=True) as caught, sync_warnings(device):
            warnings.simplefilter("always")
            executor.run(TrainTask(2), executor.send(range(6)))
        found.append(sum("called a synchronizing" in str(warning.message) for warning in caught))
    assert found[0] == found[1], found
    if device == "cpu":
        raise Skipped("needs a GPU")
    return f"{found[0]} in a round of 6 clients"


@contextmanager
def sync_warnings(device: str) -> Iterator[None]:
    """Have torch warn inside the block whenever the CPU waits for the GPU."""
    if device != "cpu":
        torch.cuda.set_sync_debug_mode("warn")
    yield
    if device != "cpu":
        torch.cuda.set_sync_debug_mode("default")
