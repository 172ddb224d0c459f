"""Short runs of five clients in which something goes wrong, and what they leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from support import Records, World, plan, states

from pflsim.config.settings import Placement
from pflsim.engine.plan import RunPlan
from pflsim.engine.simulation import Simulation
from pflsim.records.folder import LOG, run_log
from ray_actors.executor import RayExecutor
from ray_actors.layout import Node, lay_out
from ray_actors.resources import ActorPool

SIZES = (12, 7, 20, 9, 8)
CLIENTS = len(SIZES)


def on_ray(made: World, pool: ActorPool, rule: str = "retry(3)", actors: int = 2) -> RayExecutor:
    layout = lay_out(SIZES, Placement(actors=actors), [Node("here", 2, 0, 1e6)], made.factory.stacks)
    executor = RayExecutor(made.on_error(rule), layout, pool)
    executor.start()
    return executor


def outcome(executor: Any, folder: Path, listener: Records | None = None, **settings: Any) -> tuple[Any, ...]:
    """States, evaluations, reports without times, bytes and faults."""
    listener = listener or Records()
    drawn: RunPlan = plan(CLIENTS, 3, splits=("test", "val"), eval_received=True, **settings)
    with run_log(folder):
        Simulation(executor, drawn, folder, listener).run()
    reports = [[replace(report, seconds=0.0) for report in record.reports] for record in listener.records]
    rows = [record.evaluations for record in listener.records]
    faults = [(dict(record.down_bytes), dict(record.faults)) for record in listener.records]
    return states(executor), executor.server_state(), rows, reports, faults


def take_log(folder: Path) -> str:
    """What was logged since this was last asked for."""
    text = (folder / LOG).read_text() if (folder / LOG).exists() else ""
    (folder / LOG).unlink(missing_ok=True)
    return text
