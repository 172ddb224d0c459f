"""Milliseconds that a client of a small model costs: `python -m benchmarks.speed.per_client`, on one core.

The figure to compare is the ratio to the same matrix products as bare calls, measured in the same process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases import settings_of
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.prepare import PreparedRun, prepare
from lightning_modules.torch_defaults import set_torch_defaults
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.records.checkpoint_write import stage_checkpoint
from pflsim.types import ModelKind

CLIENTS, ROUNDS = 1000, 7
MODELS = {"linear": ("model=linear", "local_steps=1"), "mlp": ("model=mlp", "local_steps=2")}
COMMON = ("data=synthetic", "partition=by_client", "split.test_by=clients", "executor=inline")


class Operations(TorchDispatchMode):
    """Counts the operations that are started inside the block; on a GPU each is a kernel at least."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def measure(model: str, method: str = "fedavg", clients: int = CLIENTS, rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median milliseconds per client of each part of a round, and the operations per client."""
    sizes = f"clients={clients}", f"data.clients={clients}"
    prepared = prepare(settings_of([*COMMON, f"method={method}", *sizes, *MODELS[model]]), new=True)
    executor, ids = InlineExecutor(prepared), tuple(range(clients))
    executor.start()
    found: dict[str, list[float]] = {}

    def timed(part: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        found.setdefault(part, []).append((time.perf_counter() - start) / clients * 1e3)
        return result

    def evaluated(kind: ModelKind) -> None:
        phase = "received" if kind == "global" else "trained"
        executor.evaluate(EvalRequest(kind, phase, ids, prepared.plan.splits, 1))  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, rounds + 1):
            sent = executor.send(ids)
            trained = timed("training and reply", lambda: executor.run(TrainTask(number), sent))  # noqa: B023
            timed("fusion and drift", lambda: executor.fuse(trained))  # noqa: B023
            executor.commit()
            timed("evaluation of one model", lambda: evaluated("personal"))
            timed("evaluation of two models", lambda: (evaluated("personal"), evaluated("global")))
            states = executor.server_state(), executor.client_states()
            timed("checkpoint", lambda: stage_checkpoint(Path(folder), number, *states, {}))  # noqa: B023
            timed("bare products", lambda: bare(prepared, clients))
        with Operations() as operations:
            executor.run(TrainTask(rounds + 1), executor.send(ids))
    middle = {part: median(times[2:]) for part, times in found.items()}
    return {**middle, "operations": operations.count / clients}


def bare(prepared: PreparedRun, clients: int) -> None:
    """Do the matrix products of a round's training for all clients at once: forward, backward and update."""
    net, training = prepared.factory.build().net, prepared.factory.training
    shapes = [weight.shape for weight in net.parameters() if weight.dim() == 2]
    weights = [torch.zeros(clients, *shape) for shape in shapes]
    inputs = torch.zeros(clients, training.batch_size, shapes[0][1])
    for _ in range(training.local_steps or 1):
        layers: list[Tensor] = [inputs]
        for weight in weights:
            layers.append(torch.bmm(layers[-1], weight.transpose(1, 2)))
        gradient = layers[-1]
        for weight, before in zip(reversed(weights), reversed(layers[:-1]), strict=True):
            change = torch.bmm(gradient.transpose(1, 2), before)
            gradient = torch.bmm(gradient, weight)
            weight.sub_(change, alpha=0.1)


def figures(clients: int = CLIENTS, method: str = "fedavg") -> dict[str, dict[str, float]]:
    """Return what `measure` finds for each model."""
    set_torch_defaults()
    torch.set_num_threads(1)
    return {model: measure(model, method, clients) for model in MODELS}


def main() -> int:
    """Print the milliseconds of each model, and their ratios to the bare products."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.per_client", description=__doc__)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    given = parser.parse_args()
    found = figures(given.clients, given.method)
    print(f"{'ms per client':26}", *(f"{model:>10}" for model in MODELS), *(f"{'ratio':>8}" for _ in MODELS))
    for part in found["linear"]:
        row = [f"{found[model][part]:10.4f}" for model in MODELS]
        bare_too = MODELS if part != "operations" else ()
        ratios = [f"{found[model][part] / found[model]['bare products']:8.1f}" for model in bare_too]
        print(f"{part:26}", *row, *ratios)
    return 0


if __name__ == "__main__":
    sys.exit(main())
