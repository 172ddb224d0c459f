"""Short runs of five clients in which something goes wrong, and what they leave."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from failing_clients import Endangered, EndangeredServer
from support import Records, World, dropout_mlp, plan, states, world

from lightning_modules.training import Training
from pflsim.config.settings import Placement
from pflsim.engine.plan import RunPlan
from pflsim.engine.simulation import Simulation
from pflsim.records.folder import LOG, run_log
from ray_actors.executor import RayExecutor
from ray_actors.layout import Node, lay_out
from ray_actors.resources import ActorPool

SIZES = (12, 7, 20, 9, 8)
CLIENTS = len(SIZES)


TRAINING = Training(lr=0.1, batch_size=4, momentum=0.5)


def endangered(traps: Path, **more: Any) -> World:
    """Clients and a server on whose way traps may be set; 0 and 3 train in a stack."""
    clients, server = partial(Endangered, traps=str(traps)), EndangeredServer(traps=str(traps))
    settings = {"training": TRAINING, "model": dropout_mlp, "stacks": ((0, 3),), **more}
    return world(clients, server, sizes=SIZES, **settings)


def on_ray(made: World, pool: ActorPool, rule: str = "retry(3)", actors: int = 2) -> RayExecutor:
    layout = lay_out(SIZES, Placement(actors=actors), [Node("here", 2, 0, 1e6)], made.factory.groups)
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
