"""How many actors share a GPU, by what a client takes of it: no GPU is needed to see that the reckoning is right."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpus import Pretended
from ray._private.state import actors
from support import dropout_mlp, world

from lightning_modules.hosts.client_host import ClientHost
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.nets.mlp import Mlp
from lightning_modules.prepare import PreparedRun, prepare
from pflsim.config.compose import CONFIGS, composed, composing, to_settings
from pflsim.config.settings import Placement, Settings
from pflsim.engine.execution import TrainTask
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from ray_actors import run
from ray_actors.cluster import deployment
from ray_actors.cluster.joined import JoinedRay
from ray_actors.cluster.local import LocalRay
from ray_actors.executor import dry_run
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.executor.dry_run import Footprint, Trial, choose_actors_per_gpu, max_actors_per_gpu, measure, trials
from ray_actors.placement import elastic as elastic
from ray_actors.placement.actor_spec import Node
from ray_actors.placement.layout import Layout, Supply

pytestmark = pytest.mark.slow

MIB, GIB = 2**20, 2**30


def settings(*overrides: str, **placement: Any) -> Settings:
    with composing([CONFIGS]):
        made = to_settings(
            composed(["data=digits", "clients=8", "rounds=2", "model.hidden=[8]", *overrides], [CONFIGS])
        )
    return replace(made, placement=replace(made.placement, **{"device": "cpu", "gpus": 1, **placement}))


def job(*overrides: str, **placement: Any) -> PreparedRun:
    return prepare(settings(*overrides, **placement))


# The reckoning


@pytest.mark.parametrize(
    ("peak", "data", "actors"),
    [
        (812 * MIB, 0, 90),  # 0.9 · 80 GiB = 73,728 MiB, in parts of 812: 90.8
        (812 * MIB, 3 * GIB, 87),  # 70,656 MiB
        (72 * GIB, 0, 1),
        (72 * GIB + 1, 0, 1),  # one is tried in any case
        (36 * GIB, 0, 2),
        (36 * GIB, 1, 1),
    ],
)
def test_as_many_as_fit_in_nine_tenths(peak: int, data: int, actors: int) -> None:
    assert Footprint(1, peak, 80 * GIB).fit(data) == actors


def test_what_is_said() -> None:
    one, stack = Footprint(1, 812 * MIB, 79 * GIB), Footprint(64, 2000 * MIB, 79 * GIB)
    assert one.describe(12) == "one client takes 812 MiB of 79 GiB on the GPU: 12 actors per GPU"
    assert stack.describe(1) == "a stack of 64 clients takes 2000 MiB of 79 GiB on the GPU: 1 actor per GPU"


@pytest.mark.parametrize(
    ("placement", "supply", "most"),
    [
        ({}, Supply(16, 1), 8),  # no more than there are clients
        ({}, Supply(3, 1), 3),  # a CPU for each
        ({"gpus": 2}, Supply(7, 2), 3),
        ({"gpus": 3}, Supply(64, 3), 3),  # 8 clients over 3 GPUs
        ({"gpus": 2}, Supply(1, 2), 1),
        ({"actors": 5, "gpus": 2}, Supply(1, 2), 3),  # as many as were asked for, whatever the CPUs
        ({"clients_per_actor": 3}, Supply(1, 1), 3),
        ({"clients_per_actor": 3, "gpus": 2}, Supply(1, 2), 2),
        ({}, Supply.of([Node("a", "", 2, 1, 1e6), Node("b", "", 99, 0, 1e6)]), 2),  # CPUs far from the GPU do not help
    ],
)
def test_no_more_than_there_is_use_for(placement: dict[str, Any], supply: Supply, most: int) -> None:
    assert max_actors_per_gpu(job("lockstep=false", **placement), supply) == most


def test_stacks_count_as_one() -> None:
    assert max_actors_per_gpu(job("lockstep_clients=3"), Supply(16, 1)) == 3


@pytest.mark.parametrize("most", [{}, {"nodes": 2}, {"actors": 6}])
def test_nodes_are_waited_for_before_actors_for_a_gpu_are_counted(
    most: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only a head without GPUs was up, each GPU would have one for good."""
    nodes, given = [Node("1", "10.0.0.1", 2, 0, 1e6, here=True)], []

    def joins(seconds: float) -> None:
        nodes.append(Node("2", "10.0.0.2", 8, 1, 1e6))

    def decide(job: PreparedRun, most: int, cpus: float, *others: Any) -> tuple[Placement, str]:
        given.append((most, cpus))
        return replace(job.settings.placement, actors_per_gpu=most), "note"

    cluster = JoinedRay.__new__(JoinedRay)
    monkeypatch.setattr(cluster, "supply", lambda placement: Supply.of(nodes))
    monkeypatch.setattr(elastic, "alive_ids", lambda: frozenset(node.id for node in nodes))
    monkeypatch.setattr(elastic, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=joins))
    asked = job("lockstep=false", "ray_address=auto", actors_per_gpu="auto", **most)
    monkeypatch.setattr(deployment, "choose_actors_per_gpu", decide)
    found = deployment.plan_deployment(asked, cluster, {})
    actors = most.get("actors", 8)
    assert given == [(actors, 10)] and [spec.node for spec in found.layout.specs] == ["2"] * actors


@pytest.mark.parametrize(("clients", "said"), [("lockstep_clients=12", True), ("lockstep_clients=3", False)])
def test_fewer_stacks_than_actors_are_reported(clients: str, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients in one stack are one actor; four stacks are the four that were asked for."""
    nodes = [Node("1", "10.0.0.1", 8, 1, 1e6, here=True)]
    cluster = JoinedRay.__new__(JoinedRay)
    monkeypatch.setattr(cluster, "supply", lambda placement: Supply.of(nodes))
    monkeypatch.setattr(elastic, "alive_ids", lambda: frozenset(node.id for node in nodes))
    asked = job("clients=12", clients, "ray_address=auto", actors_per_gpu=4)
    found = deployment.plan_deployment(asked, cluster, {})
    assert len(found.layout.specs) == (1 if said else 4) and ("lockstep_clients" in "".join(found.notes)) is said


# Who is tried


def test_the_client_with_the_most_examples_is_tried() -> None:
    made = job("lockstep=false", "partition=label_lognormal", "batch_size=5", "local_epochs=2")
    sizes = [len(rows) for rows in made.partition.train]
    most = sizes.index(max(sizes))
    assert trials(made) == [Trial((most,), (most,), 3 / made.batches_per_round[most])]


def test_the_most_of_a_stack_that_train_together_are_tried() -> None:
    """Not the whole stack, where a round has a part of the clients."""
    made = job("clients=12", "lockstep_clients=6", "fraction=0.5", "rounds=3")
    (trial,) = trials(made)
    assert trial.stack in made.factory.stacks and len(trial.stack) == 6 and set(trial.unit) < set(trial.stack)
    assert len(trial.unit) == max(
        len(unit) for cohort in made.plan.cohorts for unit in made.factory.client_groups(cohort)
    )


def test_each_variant_of_the_model_is_tried() -> None:
    made = job("lockstep=false", "method=fedproto", "model.variants=[{hidden: [8]}, {hidden: [9, 8]}]")
    assert [trial.unit[0] % 2 for trial in trials(made)] == [0, 1]


# The trial


def test_a_few_batches_and_one_evaluation_and_the_largest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world(FedAvg, FedAvgServer(), sizes=(12, 7, 40, 9), eval_batch_size=2, model=dropout_mlp)
    steps, reported = [], []

    def run(self: ClientHost, task: Any, messages: Any) -> Any:
        results = original(self, task, messages)
        if isinstance(task, TrainTask):
            steps.extend(reply.report.steps for reply in results.values())
        else:
            reported.extend(row.total for rows in results.values() for row in rows)
        return results

    original = ClientHost.run
    monkeypatch.setattr(ClientHost, "run", run)
    memory, drawn, rows = Pretended([300 * MIB, 100 * MIB], GIB), torch.get_rng_state(), deepcopy(made.partition)
    tried = [Trial((2,), (2,), 3 / 10), Trial((1,), (1,), 1.0)]
    found = measure(made.factory, made.dataset, made.partition, made.rule, made.federation, tried, memory)
    assert found == Footprint(1, (300 + 500) * MIB, GIB) and memory.begun == 2
    assert steps == [3, 2] and reported == [2, 2]
    assert torch.equal(drawn, torch.get_rng_state())
    assert all((a == b).all() for a, b in zip(rows.train, made.partition.train, strict=True))


def test_a_whole_stack_is_tried_together() -> None:
    made = world(FedAvg, FedAvgServer(), model=partial(Mlp, hidden=[5]), stacks=((2, 0, 3), (1,)))
    tried = [Trial((2, 0, 3), (2, 3), 1e-9)]
    assert (
        measure(
            made.factory, made.dataset, made.partition, made.rule, made.federation, tried, Pretended([0], GIB)
        ).clients
        == 2
    )


# Runs that have the same to measure


def test_measured_once_for_runs_that_take_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, cleared = [], []

    def footprint(job: PreparedRun, cpus: float) -> Footprint:
        measured.append(job.settings)
        return Footprint(1, 400 * MIB, GIB)

    monkeypatch.setattr(dry_run, "footprint", footprint)
    known: dict[str, Footprint] = {}
    for overrides in ([], ["seed=1"], ["lr=0.5", "rounds=3"], ["placement.actors=2"]):
        placement, _ = choose_actors_per_gpu(
            job("lockstep=false", *overrides), 8, 8.0, known, lambda: cleared.append(1)
        )
        assert placement.actors_per_gpu == 2  # 921 MiB and a few KiB of data, in parts of 400
    assert len(measured) == len(cleared) == 1
    for overrides in (["batch_size=7"], ["model.hidden=[9]"], ["momentum=0.5"], ["method=ditto"]):
        choose_actors_per_gpu(job("lockstep=false", *overrides), 8, 8.0, known, lambda: cleared.append(1))
    assert len(measured) == len(cleared) == 5


def test_never_more_than_there_is_use_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "footprint", lambda job, cpus: Footprint(1, MIB, GIB))
    placement, note = choose_actors_per_gpu(job(), 3, 8.0, {}, lambda: None)
    assert placement.actors_per_gpu == 3 and note.endswith("3 actors per GPU")


# On pretended GPUs


def in_runs(pool: ActorPool, monkeypatch: pytest.MonkeyPatch, memory: Pretended) -> list[Layout]:
    """Let runs on CPUs measure given numbers; returns their layouts."""
    pool.close()  # its actors hold the GPUs
    layouts: list[Layout] = []

    def given(self: LocalRay, placement: Placement, layout: Layout) -> ActorPool:
        if layout.groups:  # without any, client actors are ended for the dry run
            layouts.append(layout)
        return pool

    monkeypatch.setattr(dry_run, "MEMORY", memory)
    monkeypatch.setattr(run, "check", lambda settings: None)  # which knows that on CPUs there is nothing to measure
    monkeypatch.setattr(LocalRay, "pool", given)
    return layouts


def counts(folder: Path) -> Sequence[Any]:
    with (folder / "per_client.csv").open(encoding="utf-8") as file:
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in csv.DictReader(file)]


def test_a_run_with_and_without_a_dry_run(
    pool: ActorPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """5.4 GiB in parts of 1,536 MiB: three; the same result to the last digit, and nothing is left of it."""
    layouts = in_runs(pool, monkeypatch, Pretended([1036 * MIB], 6 * GIB))
    common = ["lockstep=false", "progress=quiet"]
    with run.Runner() as runner:
        for name, per_gpu in (("auto", "auto"), ("again", "auto"), ("number", 3)):
            one = replace(settings(*common, actors_per_gpu=per_gpu), run_dir=str(tmp_path / name))
            runner.run(one)
    line = "one client takes 1536 MiB of 6 GiB on the GPU: 3 actors per GPU"
    assert [[spec.gpus for spec in layout.specs] for layout in layouts] == [[0.3333] * 3] * 3
    assert line in (tmp_path / "auto" / "run.log").read_text() and line in (tmp_path / "again" / "run.log").read_text()
    assert not (tmp_path / "number" / "run.log").exists()
    assert line in (said := capsys.readouterr().err) and "warning" not in said
    assert counts(tmp_path / "auto") == counts(tmp_path / "number") == counts(tmp_path / "again")
    tried = [actor["State"] for actor in actors().values() if actor["ActorClassName"] == "DryRunner"]
    assert tried == ["DEAD"]  # one for both runs


def test_a_dry_run_that_fails_says_why(pool: ActorPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here there is no GPU, and the number of what is held is missing."""
    in_runs(pool, monkeypatch, Pretended([], GIB))
    with run.Runner() as runner, pytest.raises(run.RunError, match="the dry run failed: IndexError"):
        runner.run(settings("lockstep=false", actors_per_gpu="auto"))


def test_memory_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fake = SimpleNamespace(
        init=lambda: calls.append("init"),
        empty_cache=lambda: calls.append("empty"),
        reset_peak_memory_stats=lambda device: calls.append("reset"),
        max_memory_reserved=lambda device: 7,
        get_device_properties=lambda device: SimpleNamespace(total_memory=9),
    )
    monkeypatch.setattr(dry_run.torch, "cuda", fake)
    memory = dry_run.CudaMemory()
    memory.begin()
    assert calls == ["init", "empty", "reset"] and (memory.peak(), memory.total()) == (7, 9)
