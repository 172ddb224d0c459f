"""Results are equal to the bit inline, one client per actor, packed, with 1, 2 and 4 actors."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from failing_executor import bare, files
from failure_runs import TRAINING
from support import Records, World, agree, dropout_mlp, inline, pfedcfr, plan, prepared, rounds, same, states, world

from lightning_modules.base import ClientModule
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.local import Local
from lightning_modules.prepare import PreparedRun
from lightning_modules.prototypes import class_means
from pflsim.attacks import Alie, Attackers, RandomUpdate
from pflsim.config.settings import Eval, Placement, Settings
from pflsim.data.federated import Shard
from pflsim.data.sets import drawn
from pflsim.data.shifts import Noise, Shift
from pflsim.engine.execution import ReplyTask, Sent
from pflsim.engine.simulation import Simulation
from pflsim.messages import Message, Uplink
from pflsim.params import NOTHING
from pflsim.records.predictions import PREDICTIONS
from pflsim.servers.aggregators import CenteredClipping
from pflsim.servers.base import Federation, ServerRule
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.local import Local as LocalServer
from pflsim.tasks.metrics import metrics_of
from pflsim.tasks.task import Task
from pflsim.transforms.compression import Chain
from ray_actors.executor import RayExecutor
from ray_actors.layout import Layout, Node, lay_out
from ray_actors.resources import ActorPool

CLIENTS = 4
SETS = ("others", "all", "mixture", "corrupted", "jpeg")
PLACEMENTS = {
    "one actor": Placement(actors=1),
    "packed": Placement(),
    "one client per actor": Placement(clients_per_actor=1),
}


def worlds() -> Iterator[World]:
    yield pfedcfr(training=TRAINING)
    last = world(FedAvg, FedAvgServer(), training=TRAINING, model=dropout_mlp, augment="crop_flip")
    shift = Shift((0, 1, 0, 1), (Noise(0.0, 3), Noise(0.3, 3)))
    uplink = Chain(parts=[{"random_k": {"share": 0.5}}, {"quantize": {"bits": 4}}])
    factory = replace(last.factory, uplink=uplink, metrics=metrics_of(("macro_f1", "ece"), Task("classification", 3)))
    rows = replace(last.partition, shift=shift)
    sets = drawn(Settings(clients=CLIENTS, eval=Eval(sets=[*SETS])), last.dataset, rows)
    yield replace(last, partition=replace(rows, sets=sets), factory=factory)
    robust = world(FedAvg, server := FedAvgServer(), training=TRAINING)
    server.aggregator, server.attackers = CenteredClipping(bound=0.1), Attackers(Alie(), frozenset({2}), 0, CLIENTS)
    changing = Attackers(RandomUpdate(), frozenset({1, 3}), 0, CLIENTS)
    yield replace(robust, factory=replace(robust.factory, attackers=changing))


def outcome(executor: Any, folder: Path, sets: Sequence[str] = ()) -> tuple[Any, ...]:
    """Everything a run leaves, without its times."""
    listener = Records()
    folder.mkdir()
    numbers = (np.arange(5),) * CLIENTS
    traced = plan(
        CLIENTS, 3, splits=("test", "val"), eval_received=True, trace_rounds=(2,), recorded_rows=numbers, sets=sets
    )
    traced = replace(traced, cohorts=(*traced.cohorts, ()))
    Simulation(executor, traced, folder, listener).run()
    traces = {name: data for name, data in files(folder).items() if name.startswith("trace")}
    assert len(traces) == 2 * CLIENTS + 1
    assert (folder / PREDICTIONS).exists()
    return states(executor), [bare(record) for record in listener.records], traces, (folder / PREDICTIONS).read_bytes()


@pytest.mark.parametrize("name", support.slow_except(["packed"], PLACEMENTS))
def test_equal_to_the_bit(name: str, pool: ActorPool, tmp_path: Path) -> None:
    layout = lay_out([5, 2, 9, 3], PLACEMENTS[name], [Node("here", 2, 0, 1e6)])
    for number, w in enumerate(worlds()):
        executor = RayExecutor(w, layout, pool)
        executor.start()
        inline = outcome(w.inline(), tmp_path / f"inline{number}", [*w.partition.sets])
        agree(outcome(executor, tmp_path / f"ray{number}", [*w.partition.sets]), inline)
        assert bool(inline[1][0][0].evaluations[0].metrics) == bool(w.factory.metrics)


class Means(ClientModule):
    """Sends class means of its features, so that models may differ behind them."""

    shared = NOTHING
    compares_features = True

    def reply(self, shard: Shard) -> Uplink:
        found = class_means(self.net.body, shard.train, shard.num_classes)
        return Uplink(prototypes=found, client=shard.client, num_examples=shard.num_examples)


class Counting(ServerRule[tuple[int, ...]]):
    """Counts uplinks per fusion; has an initial round, and calls all clients in round 2."""

    initial_round = True

    def full_participation(self, round_number: int, rounds: int) -> bool:
        assert rounds == 3
        return round_number == 2

    def init(self, federation: Federation) -> tuple[int, ...]:
        return ()

    def downlink(self, state: tuple[int, ...], client: int) -> Message:
        return Message()

    def fuse(self, state: tuple[int, ...], uplinks: Sequence[Uplink]) -> tuple[int, ...]:
        assert all(up.prototypes is not None for up in uplinks)
        return (*state, len(uplinks))


SMALL = ["data=digits", "clients=6", "rounds=3", "fraction=0.5", "model=mlp", "method=fedavg", "lockstep=false"]
TWO = "model.variants=[{hidden:[7,5]},{hidden:[5]}]"


def counting(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> PreparedRun:
    """A run of the client above with the counting rule."""
    monkeypatch.setattr("lightning_modules.prepare.bind_method", lambda *a, **k: (partial(Means), partial(Counting)))
    return prepared(*SMALL, *overrides)


def on_actors(made: PreparedRun, pool: ActorPool) -> RayExecutor:
    """Two actors with clients of `Local`: a class of this test file cannot travel to them by name."""
    layout = Layout(((0, 3, 5), (1, 2, 4)), 1, 0)
    made = replace(made, factory=replace(made.factory, client=Local), rule=LocalServer())
    executor = RayExecutor(made, layout, pool)
    executor.start()
    return executor


def test_an_initial_round_and_a_round_of_all_clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = counting(monkeypatch, "trace.rounds=[0]")
    executor, clients_done = inline(made), Records()
    before = states(executor)
    executor.run(ReplyTask(), Sent.nothing(range(6)))
    assert same(before, states(executor)), "the initial round changes no client"
    Simulation(executor, made.plan, tmp_path, clients_done).run()
    assert executor.server.state == (6, 3, 6, 3)
    assert [r.round for r in clients_done.records] == [0, 1, 2, 3]
    initial_round = clients_done.records[0]
    assert all(r.steps == 0 and r.up_bytes > 0 for r in initial_round.reports) and len(initial_round.reports) == 6
    assert len(list((tmp_path / "trace" / "round_0000").glob("up_*"))) == 6


@pytest.mark.slow
def test_every_client_that_is_done_is_counted(monkeypatch: pytest.MonkeyPatch, pool: ActorPool, tmp_path: Path) -> None:
    """In every phase that says how many are due, as many are."""
    made = counting(monkeypatch)
    for number, executor in enumerate((inline(made), on_actors(made, pool))):
        listener = Records()
        Simulation(executor, made.plan, tmp_path / str(number), listener).run()
        counted: list[list[Any]] = []
        for said in listener.phases:
            if isinstance(said, int):
                counted[-1][2] += said
            else:
                counted.append([said[1], said[2], 0])
        assert ["initial round", 6, 6] in counted
        assert [found for found in counted if found[0] == "train"] == [["train", n, n] for n in (3, 6, 3)]
        assert all(due == done for name, due, done in counted if name != "evaluate")
        assert sum(name == "evaluate" and due == done == 6 for name, due, done in counted) == 3


@pytest.mark.slow
def test_variants_are_dealt_in_turn_and_equal_on_actors(monkeypatch: pytest.MonkeyPatch, pool: ActorPool) -> None:
    made = counting(monkeypatch, TWO)
    alone, spread = inline(made), on_actors(made, pool)
    for executor in (alone, spread):
        rounds(executor, 2, 6)
    found = states(alone)
    assert [("net.body.fc2.weight" in found[c]) for c in range(6)] == [True, False] * 3
    assert same(found, states(spread))
