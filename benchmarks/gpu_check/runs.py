"""What the parts have in common: small runs, their outcome, and the difference of two outcomes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.cases import settings_of
from lightning_modules.contract.checks import rounds, start
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.prepare import PreparedRun, prepare
from pflsim.config.compose import CONFIGS
from pflsim.engine.execution import EvalRequest
from pflsim.messages import Message

METHODS = sorted(path.stem for path in (CONFIGS / "method").glob("*.yaml") if not path.stem.endswith("lora"))
SIX = ("pfedcfr", "fedfcd", "pfedla", "heurpfedla", "fedalp", "pfedpm")
NETS = {"mlp": ("model=mlp",), "cnn_bn": ("model=cnn_bn", "model.channels=[8,16]", "model.hidden=32")}
SMALL = (
    "executor=inline",
    "data=random_images",
    "data.examples=420",
    "clients=6",
    "rounds=2",
    "batch_size=8",
    "lr=0.05",
)
REPLAY = "lightning_modules.lockstep.replay"
"""The logger that says why steps are not replayed as a CUDA graph."""
Check = tuple[str, Callable[[], str]]
"""A name, and a function that returns what it found and raises an exception if that is wrong."""


class Skipped(Exception):
    """A check cannot run here; the text says why."""


def made(*overrides: str) -> PreparedRun:
    """Return the run of some settings, after `SMALL`."""
    chosen = {line.partition("=")[0]: line for line in (*SMALL, *overrides)}
    return prepare(settings_of(list(chosen.values())))


def started(run: PreparedRun, device: str, on_error: str = "abort") -> InlineExecutor:
    """Return an executor whose clients and server compute on the device, in torch's default dtype."""
    data = run.dataset
    if torch.get_default_dtype() == torch.float64:
        data = replace(data, x=data.x.astype(np.float64) / data.scale)
    placement = replace(run.settings.placement, server_device=torch.device(device).type)
    settings = replace(run.settings, on_client_error=on_error, placement=placement)
    executor = InlineExecutor(
        replace(run, settings=settings, factory=replace(run.factory, device=device), dataset=data)
    )
    start(executor, run)
    return executor


def train_round(executor: InlineExecutor, number: int) -> None:
    """Train all clients for a round, and fuse what they send."""
    rounds(executor, [number], executor.host.clients)


def evaluate(executor: InlineExecutor) -> None:
    """Evaluate every client's own model on its test examples."""
    request = EvalRequest("personal", "trained", executor.host.clients, ("test",), round_number=2)
    rows = executor.evaluate(request)
    assert all(np.isfinite(row.loss) for row in rows), "the loss of an evaluation is not finite"


def outcome(executor: InlineExecutor, last: int = 2) -> dict[str, Tensor]:
    """Run rounds 1 to `last`; return the tensors of all states and of the messages that the server would send next."""
    rounds(executor, range(1, last + 1), executor.host.clients)
    evaluate(executor)
    found = {f"{c}.{name}": value for c, state in executor.client_states() for name, value in state.items()}
    for client, message in executor.send(executor.host.clients).downlinks.items():
        assert isinstance(message, Message)
        sent = {**message.weights, **message.extra}
        if message.prototypes is not None:
            sent["prototypes"] = message.prototypes.means
        found |= {f"{client}.sent.{name}": value for name, value in sent.items()}
    assert all(value.device.type == "cpu" for value in found.values()), "a state or a message is not on the CPU"
    return found


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest value of each tensor; NaN equals NaN."""
    assert one.keys() == other.keys()
    pairs = [(value.double(), other[name].double()) for name, value in one.items() if value.numel()]
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in pairs), "NaN in one outcome only"
    pairs = [(a.nan_to_num(), b.nan_to_num()) for a, b in pairs]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return ‖one − other‖ / ‖other‖ over all tensors; a unit that changes its sign by rounding hardly counts."""
    a, b = (torch.cat([v.double().nan_to_num().flatten() for v in x.values()]) for x in (one, other))
    return float((a - b).norm() / b.norm())


def bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Raise an AssertionError unless two outcomes are equal to the bit."""
    assert difference(one, other) == 0, f"the largest relative difference is {difference(one, other):.1e}"


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Return the time of a call, until the device has finished."""
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect what `REPLAY` logs inside the block."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(REPLAY).addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger(REPLAY).removeHandler(handler)
