"""Results are equal to the bit inline, one client per actor, packed, with 1, 2 and 4 actors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import read_message
from support import Records, World, dropout_mlp, plan, same, slow_except, states, world

from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.pfedcfr import PFedCFR
from lightning_modules.training import Training
from pflsim.config.settings import Placement
from pflsim.data.shifts import Noise, Shift
from pflsim.engine.simulation import Simulation
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.pfedcfr import PFedCFR as PFedCFRServer
from pflsim.tasks.metrics import metrics_of
from pflsim.tasks.task import Task
from ray_actors.executor import RayExecutor
from ray_actors.layout import Node, lay_out
from ray_actors.resources import ActorPool

CLIENTS = 4
PLACEMENTS = {
    "one actor": Placement(actors=1),
    "packed": Placement(),
    "one client per actor": Placement(clients_per_actor=1),
}


def worlds() -> Iterator[World]:
    training = Training(lr=0.1, batch_size=4, momentum=0.5)
    yield world(
        partial(PFedCFR, alpha=100.0, r="body", unit="module"),
        PFedCFRServer(alpha=100.0, sigma=1e3),
        training=training,
        model=dropout_mlp,
        init="per_client",
    )
    last = world(FedAvg, FedAvgServer(), training=training, model=dropout_mlp, augment="crop_flip")
    shift = Shift((0, 1, 0, 1), (Noise(0.0, 3), Noise(0.3, 3)))
    factory = replace(last.factory, metrics=metrics_of(("macro_f1", "ece"), Task("classification", 3)))
    yield replace(last, partition=replace(last.partition, shift=shift), factory=factory)


def outcome(executor: Any, folder: Path) -> tuple[Any, ...]:
    """Everything a run leaves, without its times."""
    listener = Records()
    folder.mkdir()
    traced = plan(CLIENTS, 3, splits=("test", "val"), eval_received=True, trace_rounds=(2,))
    Simulation(executor, traced, folder, listener).run()
    rows = [r.evaluations for r in listener.records]
    losses = [[(t.client, t.steps, t.losses, t.up_bytes) for t in r.reports] for r in listener.records]
    traffic = [dict(r.down_bytes) for r in listener.records]
    return states(executor), rows, losses, traffic


@pytest.mark.parametrize("name", slow_except(["packed"], PLACEMENTS))
def test_equal_to_the_bit(name: str, pool: ActorPool, tmp_path: Path) -> None:
    layout = lay_out([5, 2, 9, 3], PLACEMENTS[name], [Node("here", 2, 0, 1e6)])
    for number, w in enumerate(worlds()):
        executor = RayExecutor(w, layout, pool)
        executor.start()
        inline = outcome(w.inline(), tmp_path / f"inline{number}")
        remote = outcome(executor, tmp_path / f"ray{number}")
        assert same(inline[0], remote[0])
        assert inline[1:] == remote[1:] and bool(inline[1][0][0].metrics) == bool(w.factory.metrics)
        _same_traces(tmp_path / f"inline{number}", tmp_path / f"ray{number}")


def _same_traces(one: Path, other: Path) -> None:
    names = sorted(p.name for p in (one / "trace" / "round_0002").iterdir())
    assert names == sorted(p.name for p in (other / "trace" / "round_0002").iterdir())
    assert len(names) == 2 * CLIENTS + 1
    for name in names:
        if not name.startswith("server"):
            a, b = (read_message(f / "trace" / "round_0002" / name) for f in (one, other))
            assert a.weights.keys() == b.weights.keys()
            assert all(torch.equal(a.weights[k], b.weights[k]) for k in a.weights)
