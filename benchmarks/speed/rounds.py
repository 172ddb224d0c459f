"""Computes the figures of a run from those of its rounds, and the floating-point operations of a round."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from lightning_modules.prepare import PreparedRun

Round = dict[str, float]
"""Seconds of each stage and in total, and counts: steps, examples trained, examples evaluated, bytes."""


def digest(prepared: PreparedRun, rounds: Sequence[Round], **more: Any) -> dict[str, Any]:
    """Return the figures of the first round, the medians of the others, and the operations of a round."""
    later = rounds[1:] or rounds
    middle = {name: median(r[name] for r in later) for name in rounds[0]}
    net, shape, batch = prepared.factory.build().net, prepared.factory.input_shape, prepared.settings.batch_size
    train = step_flops(net, shape, batch) * middle["examples"] / batch
    evaluation = forward_flops(net, shape, batch) * middle["evaluated"] / batch
    return {
        "first": rounds[0]["total"],
        "round": middle,
        "rounds": len(later),
        "spread": [min(r["total"] for r in later), max(r["total"] for r in later)],
        "gflop_train": train / 1e9,
        "gflop_evaluate": evaluation / 1e9,
        **more,
    }


def expected_steps(prepared: PreparedRun) -> int:
    """Return the mini-batches of a round in which all clients train."""
    training, smallest = prepared.factory.training, prepared.factory.build().smallest_batch
    assert training.local_steps is None, "the baselines train for epochs"
    parts = (divmod(len(rows), training.batch_size) for rows in prepared.partition.train)
    return training.local_epochs * sum(full + (rest >= smallest) for full, rest in parts)


def check_steps(prepared: PreparedRun, rounds: Sequence[Round]) -> None:
    """Check that every round has the expected number of steps, so that all ways do the same work."""
    for number, done in enumerate(rounds, start=1):
        found, expected = int(done["steps"]), expected_steps(prepared)
        assert found == expected, f"round {number}: {found} steps instead of {expected}"


def step_flops(net: nn.Module, input_shape: tuple[int, ...], batch: int) -> int:
    """Return the operations of one training step: matrix products and convolutions, forward and backward."""
    inputs, labels = torch.rand(batch, *input_shape), torch.zeros(batch, dtype=torch.long)
    net.train()
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(net(inputs), labels).backward()
    net.zero_grad(set_to_none=True)
    return counter.get_total_flops()


def forward_flops(net: nn.Module, input_shape: tuple[int, ...], batch: int) -> int:
    """Return the operations of one forward pass."""
    net.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(torch.rand(batch, *input_shape))
    return counter.get_total_flops()
