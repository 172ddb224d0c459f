"""Part 1: results on the GPU are those of the CPU, and the same every time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import pflsim
from benchmarks.data import random_images
from benchmarks.gpu_check.runs import (
    METHODS,
    NETS,
    SIX,
    Check,
    bits,
    collected_warnings,
    difference,
    distance,
    made,
    outcome,
    started,
)
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.lockstep.stack_training import Lockstep
from lightning_modules.torch_defaults import default_dtype
from pflsim.errors import RunError

MODELS = NETS | {
    "lora": ("model=mlp", "lora={r: 2}"),
    "frozen": ("model=cnn_bn", "model.channels=[8,16]", "model.hidden=32", "freeze=[body.conv1]"),
    "regression": ("model=mlp", "task=regression"),
}
OTHERS = (("fedsa_lora", "lora"), ("ffa_lora", "lora"), ("ditto", "lora"), ("ditto", "frozen"), ("ditto", "regression"))
"""Methods and models beyond the table of methods and `NETS`."""
UNCLEAR = {("fedcac", "cnn_bn")}
"""FedCAC ranks the changes of biases before BatchNorm, which are rounding errors only."""
STEPS = ("local_steps=2",)
LOOP, STACK = "lockstep=false", "lockstep_clients=6"
DTYPES = ((torch.float64, difference, 1e-9), (torch.float32, distance, 1e-2))
"""How the outcomes in each precision are compared, and the bound."""


def checks(device: str) -> list[Check]:
    """Return the checks, the most important ones first."""
    table = ((method, net) for net in NETS for method in METHODS)
    compared = [pair for pair in (*table, *OTHERS) if pair not in UNCLEAR]
    return [
        *((f"{method}, {model}", partial(against_the_cpu, device, method, model)) for method, model in compared),
        *((f"{method}, {net}, twice", partial(twice, device, method, net)) for net in NETS for method in SIX),
        *((f"{method}, resumed", partial(resumed, device, method)) for method in SIX),
        *((f"{method}, replayed steps", partial(replayed, device, method)) for method in METHODS),
        ("precisions", partial(precisions, device)),
    ]


def against_the_cpu(device: str, method: str, net: str) -> str:
    """Compare the GPU's loop and stack with the CPU's loop."""
    found: dict[str, tuple[float, float]] = {}
    with collected_warnings() as problems:
        for dtype, compare, bound in DTYPES:
            name = str(dtype).removeprefix("torch.")
            with default_dtype(dtype):
                loop, stack = (made(f"method={method}", *MODELS[net], *STEPS, way) for way in (LOOP, STACK))
                expected = outcome(started(loop, "cpu"))
                for way, run in (("loop", loop), ("stack", stack)):
                    found[f"{name} {way}"] = compare(outcome(started(run, device)), expected), bound
    text = ", ".join([*(f"{name} {worst:.0e}" for name, (worst, _) in found.items()), *dict.fromkeys(problems)])
    assert all(worst < bound for worst, bound in found.values()), text
    return text


def twice(device: str, method: str, net: str) -> str:
    """Compare two equal runs."""
    run = made(f"method={method}", *NETS[net], *STEPS, "lockstep_clients=2")
    bits(*(outcome(started(run, device)) for _ in range(2)))
    return "equal to the bit"


def resumed(device: str, method: str) -> str:
    """Compare a run with one that was stopped after round 2 and resumed."""
    data, runs = random_images(examples=420), []
    given: dict[str, Any] = dict(method=method, data=data, clients=6, rounds=4, batch_size=8, local_steps=2, lr=0.05)
    given |= {"executor": "inline", "placement.gpus": int(device != "cpu"), "checkpoint.every": 1}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        runs.append(pflsim.run(**given, run_dir=f"{folder}/whole"))
        with interrupted(3), suppress(KeyboardInterrupt, RunError):
            pflsim.run(**given, run_dir=f"{folder}/stopped")
        runs.append(pflsim.resume(f"{folder}/stopped", data=data))
        tables = [(Path(run.folder) / "per_client.csv").read_bytes() for run in runs]
    assert runs[1].summary["resumed_after"], "the run was not resumed"
    assert tables[0] == tables[1], "per_client.csv differs"
    return "equal to the bit"


@contextmanager
def interrupted(fusion: int) -> Iterator[None]:
    """Interrupt a run inside the block before one of its fusions."""
    real, calls = InlineExecutor.fuse, count(1)

    def fuse(self: InlineExecutor, *given: Any, **named: Any) -> Any:
        if next(calls) == fusion:
            raise KeyboardInterrupt
        return real(self, *given, **named)

    with mock.patch.object(InlineExecutor, "fuse", fuse):
        yield


def replayed(device: str, method: str) -> str:
    """Compare steps that are replayed, on a GPU as a CUDA graph, with steps in turn."""
    run, found = made(f"method={method}", *NETS["mlp"], STACK), []
    with collected_warnings() as problems:
        for replay in (False, True):
            executor = started(run, device)
            executor.host.locksteps = {v: Lockstep(m, replay) for v, m in executor.host.modules.items()}
            found.append(outcome(executor))
    assert not problems, problems[0]
    bits(*found)
    return "equal to the bit"


def precisions(device: str) -> str:
    """Compare one round with each precision with one on the CPU in float32."""
    run, found = made("method=fedavg", *NETS["cnn_bn"], *STEPS), []
    bounds = {"ieee": 1e-5, "bf16": 3e-2} | ({} if device == "cpu" else {"tf32": 1e-2})
    exact = outcome(started(run, "cpu"), last=1)
    for name, bound in bounds.items():
        factory = replace(run.factory, training=replace(run.factory.training, precision=name))
        far = distance(outcome(started(replace(run, factory=factory), device), last=1), exact)
        found.append(f"{name} {far:.0e}")
        assert far < bound, ", ".join(found)
    return ", ".join(found)
