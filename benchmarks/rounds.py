"""From what single rounds took to the figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.flops import forward_flops, step_flops
from ray_actors.prepare import PreparedRun

Round = dict[str, float]
"""Seconds by part and in all (`total`), and counts: steps, examples trained, examples evaluated, bytes."""


def digest(job: PreparedRun, rounds: Sequence[Round], **more: Any) -> dict[str, Any]:
    """The first round apart, the median of the others part by part, and the operations of such a round."""
    later = rounds[1:] or rounds
    middle = {name: median(r[name] for r in later) for name in rounds[0]}
    net, shape, batch = job.factory.build().net, job.factory.input_shape, job.settings.batch_size
    train = step_flops(net, shape, batch) * middle["examples"] / batch
    request = forward_flops(net, shape, batch) * middle["evaluated"] / batch
    return {
        "first": rounds[0]["total"],
        "round": middle,
        "rounds": len(later),
        "spread": [min(r["total"] for r in later), max(r["total"] for r in later)],
        "gflop_train": train / 1e9,
        "gflop_evaluate": request / 1e9,
        **more,
    }


def expected_steps(job: PreparedRun) -> int:
    """Mini-batches of a round in which all clients train, from the job alone."""
    training, smallest = job.factory.training, job.factory.build().smallest_batch
    assert training.local_steps is None, "the yardsticks train for epochs"
    parts = (divmod(len(rows), training.batch_size) for rows in job.partition.train)
    return training.local_epochs * sum(full + (rest >= smallest) for full, rest in parts)


def check_steps(job: PreparedRun, rounds: Sequence[Round]) -> None:
    """Hold every round to the steps that the job asks for, so that all ways do the same."""
    for number, done in enumerate(rounds, start=1):
        found, expected = int(done["steps"]), expected_steps(job)
        assert found == expected, f"round {number}: {found} steps instead of {expected}"
