"""Runs pflsim as launch.py does, and measures every round."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.speed.rounds import Round, check_steps, digest
from lightning_modules.prepare import prepare
from pflsim.config.settings import Settings
from pflsim.records.history import RoundMetrics
from pflsim.records.tracker import Tracker, held_mb
from pflsim.types import RoundRecord
from ray_actors.run import Runner

PHASES = ("downlink", "train", "fuse", "evaluate")


def measure(settings: Settings, root: Path, growth: bool = False) -> dict[str, Any]:
    """Run the settings and return the figures.

    Args:
        settings: the settings of the run.
        root: the folder for the run folder.
        growth: record the memory after every round; this time is not measured.
    """
    rounds, held, counts, ends = list[Round](), list[float](), list[tuple[int, int]](), list[float]()
    write = Tracker.round

    def measured(tracker: Tracker, record: RoundRecord) -> RoundMetrics:
        start = time.perf_counter()
        metrics, seconds = write(tracker, record), dict(record.seconds)
        checkpoint, end = seconds.pop("checkpoint", 0.0), time.perf_counter()  # only the last round writes one
        whole = end - checkpoint - ends[-1] if ends else end - start + sum(seconds.values())
        reported = [row for row in record.evaluations if row.model == tracker.meta.reported_model]
        counts.append((sum(row.correct or 0 for row in reported), sum(row.total for row in reported)))
        rounds.append(
            {
                **{name: seconds[name] for name in PHASES},
                "server": seconds["downlink"] + seconds["fuse"] + seconds["diagnostics"],
                "total": whole,
                "steps": sum(report.steps for report in record.reports),
                "examples": sum(report.num_examples for report in record.reports),
                "evaluated": sum(row.total for row in record.evaluations),
                **{"up_bytes": metrics.traffic.up_bytes, "down_bytes": metrics.traffic.down_bytes},
            }
        )
        if growth:
            held.append(held_mb())
        ends.append(time.perf_counter())
        return metrics

    with mock.patch.object(Tracker, "round", measured), Runner() as runner:
        runner.run(replace(settings, run_dir=str(root / "run")))
    prepared, (correct, total) = prepare(settings), counts[-1]
    if settings.fraction == 1:
        check_steps(prepared, rounds)
    memory = {"held_mb": held} if growth else {}
    cores, lockstep = settings.placement.actors or 1, bool(prepared.factory.stacks)
    return digest(prepared, rounds, accuracy=correct / max(total, 1), cores=cores, lockstep=lockstep, **memory)
