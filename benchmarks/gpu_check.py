"""Checks a GPU: results, determinism, memory, errors and speed. `make gpu-check`, without Ray."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pflsim
from benchmarks.cases import ROOT
from benchmarks.report import table
from lightning_modules.lockstep.training import Lockstep
from pflsim.config.compose import CONFIGS, composed, composing, plain
from pflsim.engine.execution import EvalRequest, ReplyTask, TrainTask
from pflsim.errors import ClientError
from pflsim.run_folder.environment import code, machine, versions
from pflsim.types import Tensors
from ray_actors.executor.dry_run import CudaMemory, measure, trials
from ray_actors.hosts.client_errors import in_words
from ray_actors.hosts.client_host import ClientHost
from ray_actors.hosts.gpu import claim_device
from ray_actors.hosts.inline import InlineExecutor
from ray_actors.prepare import PreparedRun, prepare

PAGE = ROOT / "docs" / "gpu.md"
METHODS = sorted(path.stem for path in (CONFIGS / "method").glob("*.yaml"))
PLAIN_SGD = {"scaffold"}
"""Methods that refuse momentum."""
MLP, CNN = ("model=mlp", "model.hidden=[16]"), ("model=cnn_bn", "model.padding=2", "local_steps=3")
SMALL = ("executor=inline", "data=digits", "clients=6", "batch_size=8", "rounds=2", "lr=0.05")
NEEDS_GPU = "needs a GPU"
"""What a check returns that has nothing to do on a CPU."""
CHECKS: dict[str, Callable[[str], str]] = {}


def check(function: Callable[[str], str]) -> Callable[[str], str]:
    """Add a check: a function of the device that returns what it found, and raises AssertionError."""
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Build modules with this dtype inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def made(*overrides: str) -> PreparedRun:
    """Return the run of some settings."""
    with composing([CONFIGS]):
        return prepare(plain(composed([*SMALL, *overrides], [CONFIGS])))


def started(run: PreparedRun, device: str, dtype: torch.dtype = torch.float32) -> InlineExecutor:
    """Return an executor whose clients and server compute on the device."""
    data = run.dataset
    if dtype == torch.float64:
        data = replace(data, x=data.x.astype(np.float64) / data.scale)
    parts = replace(run.factory, device=device), data, run.partition, run.rule, run.federation
    executor = InlineExecutor(*parts, server_device=torch.device(device).type)
    executor.start()
    return executor


def states_of(executor: InlineExecutor, rounds: int = 2) -> dict[int, Tensors]:
    """Run some rounds with all clients and return their private states."""
    clients = range(len(executor.host.clients))
    if executor.server.rule.initial_round:
        executor.server.fuse([r.uplink for r in executor.host.run(ReplyTask(), dict.fromkeys(clients)).values()])
    for number in range(1, rounds + 1):
        trained = executor.run(TrainTask(number), executor.send(clients))
        executor.store(trained)
        uplinks = [uplink for handle in trained.uplinks for uplink in executor.uplinks(handle)]
        for uplink in uplinks:
            sent = (*uplink.weights.values(), *uplink.extra.values())
            assert all(value.device.type == "cpu" and bool(value.isfinite().all()) for value in sent)
        executor.server.fuse(uplinks)
    rows = executor.evaluate(EvalRequest("personal", "trained", tuple(clients), ("test",)))
    assert all(np.isfinite(row.loss) for row in rows)
    return dict(executor.client_states())


def difference(one: dict[int, Tensors], other: dict[int, Tensors]) -> float:
    """Return the largest difference of two sets of states, relative to the largest value of each tensor."""
    pairs = [(value.double(), other[client][name].double()) for client in one for name, value in one[client].items()]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs if a.numel())


@check
def every_method(device: str) -> str:
    """All methods, two nets, two rounds: messages on the CPU and finite."""
    for method in METHODS:
        for net in (MLP, CNN):
            states_of(started(made(f"method={method}", *net), device))
    return f"{len(METHODS)} methods, two nets"


@check
def equal_to_the_cpu(device: str) -> str:
    """In float64 below 1e-9."""
    worst = 0.0
    with default_dtype(torch.float64):
        for method in METHODS:
            run = made(f"method={method}", *MLP)
            worst = max(worst, difference(*(states_of(started(run, on, torch.float64)) for on in (device, "cpu"))))
    assert worst < 1e-9, worst
    return f"largest difference {worst:.1e}"


@check
def precision(device: str) -> str:
    """One round with each precision is close to one on the CPU in float32."""
    run, found = made("method=fedavg", *CNN), []
    bounds = {"ieee": 1e-3, "tf32": 3e-2, "bf16": 3e-1}
    exact = states_of(started(run, "cpu"), rounds=1)
    for name in ("ieee", "bf16") if device == "cpu" else ("ieee", "tf32", "bf16"):
        factory = replace(run.factory, training=replace(run.factory.training, precision=name))
        low = states_of(started(replace(run, factory=factory), device), rounds=1)
        found.append(f"{name} {difference(low, exact):.1e}")
        assert difference(low, exact) < bounds[name], found
    return ", ".join(found)


@check
def lockstep_and_loop(device: str) -> str:
    """In float64 below 1e-9, with all clients in one stack."""
    worst = 0.0
    with default_dtype(torch.float64):
        for method in METHODS:
            alone = made(f"method={method}", *MLP, "lockstep=false")
            stacked = made(f"method={method}", *MLP, "lockstep_clients=6")
            found = (states_of(started(run, device, torch.float64)) for run in (alone, stacked))
            worst = max(worst, difference(*found))
    assert worst < 1e-9, worst
    return f"largest difference {worst:.1e}"


@check
def replayed_steps(device: str) -> str:
    """Replayed steps, on a GPU as CUDA graphs, end with the same bits as steps in turn."""
    for method in METHODS:
        found, momentum = [], () if method in PLAIN_SGD else ("momentum=0.5",)
        for replay in (False, True):
            executor = started(made(f"method={method}", *MLP, "lockstep_clients=6", *momentum), device)
            executor.host.locksteps = {v: Lockstep(m, replay) for v, m in executor.host.modules.items()}
            found.append(states_of(executor))
        assert difference(*found) == 0, method
    return f"{len(METHODS)} methods"


@check
def alone_or_in_company(device: str) -> str:
    """The clients of one stack end with the same bits, whoever else is on their host."""
    for net in (MLP, CNN):
        run = made("method=fedprox", *net, "lockstep_clients=2")
        executor = started(run, device)
        sent = executor.send(range(6))
        executor.store(executor.run(TrainTask(1), sent))
        stack = run.factory.stacks[0]
        few = ClientHost(replace(run.factory, device=device), run.dataset, run.partition, stack)
        replies = few.run(TrainTask(1), executor.server.downlinks(stack))
        together = dict(executor.client_states())
        assert difference({c: replies[c].state or {} for c in stack}, together) == 0, net
    return "two nets"


@check
def repeated_to_the_bit(device: str) -> str:
    """The same run twice."""
    for method in ("fedavg", "fedproto", "gpfl"):
        for net in (MLP, CNN):
            run = made(f"method={method}", *net, "lockstep_clients=2")
            first, second = (states_of(started(run, device)) for _ in range(2))
            assert difference(first, second) == 0, (method, net)
    return "3 methods, two nets"


@check
def memory_share_and_errors(device: str) -> str:
    """An allocation above the share fails, with the project's advice, and a smaller one works afterwards."""
    if device == "cpu":
        return NEEDS_GPU
    total = torch.cuda.get_device_properties(0).total_memory
    claim_device(device, 0.1)
    try:
        torch.empty(int(0.2 * total), dtype=torch.uint8, device=device)
        raise AssertionError("0.2 of the memory was allocated with a share of 0.1")
    except torch.OutOfMemoryError as error:
        words = in_words(error)
        torch.empty(int(0.01 * total), dtype=torch.uint8, device=device)
    finally:
        claim_device(device, 1.0)
    assert "placement.actors_per_gpu" in words
    return words.partition(":")[0]


@check
def device_assert(device: str) -> str:
    """A failing assertion on the GPU is recognised as one after which the process cannot continue."""
    if device == "cpu":
        return NEEDS_GPU
    lines = (
        "import torch",
        "from ray_actors.hosts.failures import kind_of",
        "x = torch.zeros(4, device='cuda')",
        "try:",
        "    x.index_select(0, torch.tensor([9], device='cuda')); torch.cuda.synchronize()",
        "except Exception as error:",
        "    print(type(error).__name__, kind_of(error))",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split()[-1:] == ["device"], done.stdout + done.stderr[-300:]
    return done.stdout.strip()


@check
def retry_after_out_of_memory(device: str) -> str:
    """A task that ran out of memory leaves the states as they were; repeated with enough memory it gives the same."""
    if device == "cpu":
        return NEEDS_GPU
    run = made("method=fedavg", "model=mlp", "model.hidden=[4096]", "lockstep_clients=6")
    executors = [started(run, device) for _ in range(2)]
    expected = states_of(executors[0], rounds=1)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    try:
        states_of(executors[1], rounds=1)
        raise AssertionError("there was enough memory")
    except ClientError as error:
        words = str(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert difference(states_of(executors[1], rounds=1), expected) == 0
    return words.partition("\n")[0][:120]


@check
def no_waits_between_steps(device: str) -> str:
    """The CPU waits for the GPU as often for 20 epochs as for one."""
    if device == "cpu":
        return NEEDS_GPU
    found = []
    for epochs in (1, 20):
        settings = "method=fedavg", *MLP, "partition=iid", "lockstep_clients=6", f"local_epochs={epochs}"
        executor = started(made(*settings), device)
        states_of(executor, rounds=1)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                executor.run(TrainTask(2), executor.send(range(6)))
            found.append(sum("synchroniz" in str(warning.message) for warning in caught))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert found[0] == found[1], found
    return f"{found[0]} waits in a round of 6 clients"


@check
def flat_memory(device: str) -> str:
    """As much memory is in use after six rounds as after three."""
    if device == "cpu":
        return NEEDS_GPU
    executor = started(made("method=pfedcfr", *CNN), device)
    found = []
    for _ in range(2):
        states_of(executor, rounds=3)
        found.append(torch.cuda.memory_allocated())
    assert found[0] == found[1], found
    return f"{found[1] / 2**20:.1f} MiB"


@check
def dry_run(device: str) -> str:
    """Measures the memory of a client."""
    if device == "cpu":
        return NEEDS_GPU
    run = made("method=fedavg", *CNN)
    factory = replace(run.factory, device=device)
    tried = trials(run)
    return measure(factory, run.dataset, run.partition, run.rule, run.federation, tried, CudaMemory()).describe(1)


@check
def on_ray(device: str) -> str:
    """Four actors at a quarter of the GPU, and `auto`: equal to one process; a run that is resumed ends the same."""
    if device == "cpu":
        return NEEDS_GPU
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError:
        return "skipped: Ray is not installed"
    given = dict(data="digits", clients=8, lockstep_clients=2, rounds=2)
    with tempfile.TemporaryDirectory() as folder:
        on_gpu = {"executor": "ray", "placement.gpus": 1}
        runs = [
            pflsim.run(**given, **on_gpu, **{"placement.actors_per_gpu": share, "run_dir": f"{folder}/{share}"})
            for share in (1, 4, "auto")
        ]
        expected = pflsim.run(**{**given, "rounds": 1}, **on_gpu, run_dir=f"{folder}/first")
        runs.append(pflsim.run(resume=str(expected.folder), rounds=2))
        tables = [(Path(run.folder) / "per_client.csv").read_bytes() for run in runs]
    assert all(other == tables[0] for other in tables)
    return "1 and 4 actors, auto, resumed: equal to the bit"


@check
def kernels_of_a_step(device: str) -> str:
    """Kernels that one step of a stack of 32 starts one by one."""
    if device == "cpu":
        return NEEDS_GPU
    found = []
    for replay in (False, True):
        executor = wide_run(device, ["lockstep_clients=32", "clients=32", "local_steps=64"], replay)
        sent = executor.send(range(32))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            executor.run(TrainTask(2), sent)
        launched = [event.count for event in profile.key_averages() if "LaunchKernel" in event.key]
        found.append(f"{sum(launched) / 64:.1f}")
    return f"{found[0]} in turn, {found[1]} replayed"


def wide_run(device: str, overrides: Sequence[str], replay: bool) -> InlineExecutor:
    """Return an executor of clients with the MLP that has trained one round."""
    run = made("method=fedavg", "clients=64", "model=mlp", "partition=iid", *overrides)
    executor = started(run, device)
    executor.host.locksteps = {v: Lockstep(m, replay) for v, m in executor.host.modules.items()}
    executor.run(TrainTask(1), executor.send(range(run.plan.clients)))
    return executor


@check
def speed(device: str) -> str:
    """Seconds for a round of 64 clients with the MLP: loop, stacks of several widths, and these replayed."""
    found = []
    stacks = [([f"lockstep_clients={n}"], replay) for n in (8, 16, 32, 64) for replay in (False, True)]
    for overrides, replay in [(["lockstep=false"], False), *stacks]:
        executor = wide_run(device, overrides, replay)
        seconds = []
        for number in (2, 3):
            sent = executor.send(range(64))
            start = time.perf_counter()
            executor.run(TrainTask(number), sent)
            seconds.append(time.perf_counter() - start)
        found.append(f"{overrides[0]}{' replayed' if replay else ''} {min(seconds):.3f}")
    return ", ".join(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cpu tries the checks themselves, without writing the page")
    parser.add_argument("--only", default="", help="part of the name of a check")
    given = parser.parse_args(arguments)
    if given.device != "cpu" and not torch.cuda.is_available():
        print("no GPU: torch sees none, so nothing was checked")
        return 0
    claim_device(given.device, 1.0)
    rows: list[list[Any]] = []
    for name, function in CHECKS.items():
        if given.only not in name:
            continue
        start = time.perf_counter()
        try:
            text = function(given.device)
            status = "skipped" if text == NEEDS_GPU else "ok"
        except Exception as error:
            status, text = "FAILED", f"{type(error).__name__}: {error}".partition("\n")[0]
        rows.append([name, status, text, f"{time.perf_counter() - start:.0f} s"])
        print("  ".join(map(str, rows[-1])), flush=True)
    if given.device != "cpu" and not given.only:
        where = json.dumps({"code": code(), "machine": machine(), "torch": versions()["torch"]}, indent=1)
        found = table(["check", "result", "found", "time"], rows)
        PAGE.write_text(f"# GPU\n\nWritten by `make gpu-check`.\n\n{found}\n\n```\n{where}\n```\n", encoding="utf-8")
        print(f"written to {PAGE.relative_to(ROOT)}")
    return int(any(row[1] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
