"""Clients that train in lockstep end as they do one by one, method by method, and the same on every placement."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    IN_BOTH_TIERS,
    KINDS,
    FxProgram,
    Records,
    agree,
    exact,
    prepared,
    same,
    settings_of,
    slow_except,
    states,
)
from support import STACKED as STACKABLE

from lightning_modules import loop
from lightning_modules.base import ClientModule
from lightning_modules.contract.checks import inline
from lightning_modules.hosts import client_host
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.lockstep import compiler
from lightning_modules.lockstep.batch_schedule import ClientTraining
from lightning_modules.lockstep.program import Program
from lightning_modules.lockstep.stack_training import Stack
from lightning_modules.prepare import PreparedRun, prepare
from pflsim.data.federated import Examples
from pflsim.engine.execution import TrainTask
from pflsim.engine.simulation import Simulation
from pflsim.errors import SettingsError
from pflsim.records.saved_settings import saved_settings
from ray_actors.executor import RayExecutor
from ray_actors.layout import Layout
from ray_actors.resources import ActorPool
from ray_actors.run import Runner

SMALL = ["data=digits", "clients=5", "rounds=2", "batch_size=8", "lr=0.05", "fraction=0.8", "model.hidden=[8]"]
NORMED = ["data=digits", "clients=5", "rounds=2", "batch_size=8", "lr=0.05"]
NORMED += ["model=cnn_bn", "model.padding=2", "model.channels=[2,3]", "model.hidden=6"]


def run(made: PreparedRun, folder: Path) -> tuple[InlineExecutor, Records]:
    executor, records = inline(replace(made, dataset=exact(made.dataset))), Records()
    Simulation(executor, made.plan, folder, records).run()
    return executor, records


def assert_close(one: InlineExecutor, other: InlineExecutor, times: float = 1) -> None:
    torch.testing.assert_close(states(one), states(other), rtol=1e-9 * times, atol=1e-11 * times)


def assert_equal_to_the_loop(folder: Path, *overrides: str, together: int = 3) -> None:
    loop, in_turn = run(prepared(*overrides, "lockstep=false"), folder / "loop")
    made = prepared(*overrides, "lockstep=true", f"lockstep_clients={together}")
    assert max(map(len, made.factory.stacks)) == together
    stacked, found_in = run(made, folder / "stacked")
    assert any(len(lockstep.traces) for lockstep in stacked.host.locksteps.values())
    times = 100 if "method=pfedfda" in overrides else 1  # its search for β enlarges rounding
    assert_close(stacked, loop, times)
    for one, other in zip(in_turn.records, found_in.records, strict=True):
        assert one.cohort == other.cohort
        for a, b in zip(one.reports, other.reports, strict=True):
            assert (a.client, a.steps, a.up_bytes) == (b.client, b.steps, b.up_bytes)
            assert dict(b.losses) == pytest.approx(dict(a.losses), rel=1e-9 * times, abs=1e-12 * times)


DECAYED = [*SMALL, "momentum=0.5", "weight_decay=0.01", "local_steps=9"]
FEW = ["data=digits", "clients=3", "batch_size=16", "local_steps=3", "rounds=1", "lr=0.01"]
"""Few steps: normalisation over a few numbers makes much of rounding, as do the inner steps of pFedMe."""
STACKED = ["data=digits", "rounds=1", "batch_size=8", "lr=0.05", "model.hidden=[8]", "local_epochs=2"]
BELOW = [*STACKED[:-1], "batch_size=900", "partition=iid", "clients=9"]
"""Shards below the batch size: every batch is a smaller one."""
IN_FAST = [
    *product(sorted(IN_BOTH_TIERS), [SMALL], [3]),
    *product(["fedavg", "pfedpm"], [DECAYED], [3]),
    ("fedselect", [*DECAYED, "clip_grad_norm=0.1"], 3),
    ("fedbn", NORMED, 1),
    *product(["fedprox"], [[*STACKED, "clients=12", f"momentum={value}"] for value in (0, 0.5)], [12]),
    *product(["fedavg"], [[*BELOW, length] for length in ("local_steps=3", "local_epochs=2")], [9]),
]
IN_SLOW = [
    *product(STACKABLE, [SMALL], [3]),
    *product(KINDS, [SMALL], [1]),
    *product(["fedrep", "gpfl", "per_fedavg", "pfedme"], [DECAYED], [3]),
    *product(["fedavg", "fedbn", "ditto", "fedfcd", "r_pfedpm", "gpfl", "fedfomo", "per_fedavg"], [NORMED], [3]),
    *product(["cfl", "fd", "fedem", "fedmrl", "fedphp", "fml", "knn_per"], [NORMED], [3]),
    *product(["pfedme"], [[*NORMED, "local_steps=3"]], [1, 3]),
    *product(["fedavg"], [[*FEW, "model=resnet18", "model.width=4"], [*FEW, "model=lenet", "model.padding=2"]], [1]),
]


@pytest.mark.parametrize(
    ("method", "settings", "together"),
    slow_except(IN_FAST, [*IN_FAST, *(row for row in IN_SLOW if row not in IN_FAST)]),
)
def test_equal_to_the_loop(method: str, settings: list[str], together: int, double: None, tmp_path: Path) -> None:
    """Ragged shards, changing cohorts, last batches of other sizes, running statistics, and twelve clients in one
    stack, with rows that wait between epochs; float64, so that only rounding may differ.
    """
    assert_equal_to_the_loop(tmp_path, f"method={method}", *settings, together=together)


def test_equal_by_torch_fx(double: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run in which torch.fx executes the traced steps ends with the same bits."""
    found = []
    for kind in (Program, FxProgram):
        monkeypatch.setattr(compiler, "Program", kind)
        made = prepared("method=fedprox", *SMALL, "lockstep=true", "lockstep_clients=3")
        executor, _ = run(made, tmp_path / kind.__name__)
        programs = [step.program for lockstep in executor.host.locksteps.values() for step in lockstep.traces.values()]
        assert programs and all(isinstance(program, kind) for program in programs)
        found.append(states(executor))
    assert same(*found)


def test_architectures_are_stacked_apart(double: None, tmp_path: Path) -> None:
    variants = "model.variants=[{hidden:[8]},{hidden:[6,8]}]"
    made = prepared("method=fedproto", *SMALL, variants, "lockstep=true")
    assert all(len({made.factory.variant_of(c) for c in stack}) == 1 for stack in made.factory.stacks)
    assert_equal_to_the_loop(tmp_path, "method=fedproto", *SMALL, variants)


def test_methods_that_cannot() -> None:
    hessian = ["method=per_fedavg", "method.variant=hf"]
    for settings in (hessian, ["method=fedcp", "method.gumbel=true"], ["method=floco"]):
        with pytest.raises(SettingsError, match=f"lockstep=true: {settings[0].removeprefix('method=')}"):
            prepared(*settings, "lockstep=true")
        assert prepared(*settings).factory.stacks == ()


def test_convolutions_on_a_cpu_are_stacks_of_one() -> None:
    convolutional = ["model=cnn", "model.padding=2", "clients=4"]
    assert sorted(prepared(*convolutional).factory.stacks) == [(0,), (1,), (2,), (3,)]
    assert [*map(len, prepared(*convolutional, "lockstep_clients=4").factory.stacks)] == [4]
    assert prepared(*convolutional, "lockstep=false").factory.stacks == ()


def test_stacks_are_a_matter_of_the_run() -> None:
    """Every client that trains is in one, those with the largest shards first; more where fewer take part."""
    made = prepared("clients=12", "eval.holdout_clients=1")
    sizes = [len(rows) for rows in made.partition.train[:11]]
    flat = [client for stack in made.factory.stacks for client in stack]
    assert flat == sorted(range(11), key=lambda c: (-sizes[c], c)) and [*map(len, made.factory.stacks)] == [3, 4, 4]
    assert [*map(len, prepared("clients=12", "fraction=0.5").factory.stacks)] == [6, 6]
    assert [*map(len, prepared("clients=12", "lockstep_clients=12").factory.stacks)] == [12]


@pytest.mark.parametrize(
    ("overrides", "size", "largest"),
    [
        ("clients=112 model=linear", 7, 7),
        ("clients=240 model=linear fraction=0.5", 14, 14),
        ("clients=112 model=linear lockstep_clients=3", 3, 3),
        ("clients=95 model=linear", None, 5),
        ("clients=112 model=linear lockstep=false", None, 0),
        ("clients=112 model=mlp model.hidden=[1000]", None, 5),
        ("clients=112 model=cnn model.padding=2", None, 1),
    ],
)
def test_many_clients_of_a_small_model_have_larger_stacks(overrides: str, size: int | None, largest: int) -> None:
    given = {"method": "fedavg", "split.validation": 0} | dict(each.split("=") for each in overrides.split())
    begun = prepare(settings_of("data=digits", *(f"{key}={value}" for key, value in given.items())), new=True)
    assert begun.settings.lockstep_clients == size
    assert max(map(len, begun.factory.stacks), default=0) == largest
    settings = replace(begun.settings, lockstep_clients=None)  # as runs have it that began before
    if settings != begun.settings and size != 3:
        assert max(map(len, prepare(settings).factory.stacks)) == -(-5 // settings.fraction)


def test_the_size_of_stacks_is_kept(tmp_path: Path) -> None:
    settings = ["method=fedavg", "data=digits", "clients=112", "model=linear", "executor=inline", "split.validation=0"]
    with Runner() as runner:
        folder = runner.run(settings_of(*settings, "rounds=1", f"run_dir={tmp_path / 'run'}"))
        assert saved_settings(folder).lockstep_clients == 7
        runner.resume(folder, replace(saved_settings(folder), rounds=2))


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stragglers of clients, by their numbers of examples; one in three does all of its work."""

    def share(examples: int) -> float:
        return (1.0, 0.4, 0.05)[examples % 3]

    def train_slowly(module: ClientModule, examples: Examples, order: torch.Generator, *_: float) -> Any:
        return loop.train(module, examples, order, share(len(examples)))

    def slow_training(*given: Any, **named: Any) -> ClientTraining:
        member = ClientTraining(*given, **named)
        member.work = share(member.count)
        return member

    monkeypatch.setattr(client_host, "train", train_slowly)
    monkeypatch.setattr(client_host, "ClientTraining", slow_training)


@pytest.mark.parametrize("method", slow_except(["pfedcfr"], [*KINDS, "fedrep", "pfedcfr"]))
def test_stragglers_leave_early(method: str, double: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that do a share of their work, in a stack with others, end as they do alone."""
    made = prepared(f"method={method}", *SMALL, "local_epochs=2", "lockstep=true", "lockstep_clients=5")
    (stack,) = made.factory.stacks
    kinds = {len(made.partition.train[client]) % 3 for client in stack}
    assert len(kinds) > 1, "no stragglers among them"
    slow(monkeypatch)
    assert_equal_to_the_loop(tmp_path, f"method={method}", *SMALL, "local_epochs=2", together=5)


@pytest.mark.slow
def test_stragglers_with_batch_norm_and_momentum(double: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch)
    more = ["momentum=0.5", "weight_decay=0.01", "local_steps=9", "method.head_epochs=2"]
    assert_equal_to_the_loop(tmp_path, "method=fedrep", *NORMED, *more)


@pytest.mark.parametrize(
    "method", slow_except(["fedfcd"], ["fedfcd", "fedfomo", "gpfl", "heurpfedla", "l2gd", "pfedpm", "r_pfedpm"])
)
def test_clients_of_a_stack_with_different_pasts(method: str, double: None) -> None:
    """Some trained without a report, others never trained; their stages may differ."""
    found = []
    for lockstep in (["lockstep=false"], ["lockstep=true", "lockstep_clients=5"]):
        made = prepared(f"method={method}", *SMALL, "fraction=1.0", *lockstep)
        executor = inline(replace(made, dataset=exact(made.dataset)))
        for t, (reached, reported) in enumerate([((0, 1), ()), (range(5), (1, 3)), (range(5), range(5))], start=1):
            trained = executor.run(TrainTask(t), executor.send(reached))
            ups = [up for handle in trained.uplinks for up in executor.uplinks(handle)]
            executor.server.fuse([up for up in ups if up.client in reported])
        found.append((executor, [report.steps for report in trained.reports]))
    assert found[0][1] == found[1][1]
    assert_close(found[1][0], found[0][0])


def test_a_stragglers_steps_are_counted(double: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: ⌈share · batches⌉ of two epochs, alike in a stack and alone."""
    slow(monkeypatch)
    for lockstep in ("true", "false"):
        made = prepared(*SMALL, "local_epochs=2", f"lockstep={lockstep}")
        _, records = run(made, tmp_path / lockstep)
        for report in (report for record in records.records for report in record.reports):
            batches = 2 * -(-report.num_examples // 8)
            share = (1.0, 0.4, 0.05)[report.num_examples % 3]
            assert report.steps == max(1, math.ceil(share * batches))


ODD = [*SMALL[:-1], "model.hidden=[7]", "eval.batch_size=1"]
"""The rows of a stack of 7-10 weights do not all begin where a product of one example comes to the same last bits."""
CONV = [*NORMED, "fraction=0.8"]


@pytest.mark.parametrize(
    ("method", "small"),
    slow_except(
        [("fedfcd", ODD)], [("fedprox", SMALL), ("fedprox", ODD), ("fedfcd", ODD), ("fedprox", CONV), ("fedfomo", CONV)]
    ),
)
def test_equal_on_actors(method: str, small: list[str], pool: ActorPool, tmp_path: Path) -> None:
    """To the bit on any placement, also where results depend on memory layout and alignment."""
    made = prepared(f"method={method}", *small, "lockstep=true", "lockstep_clients=3", "eval.holdout_clients=1")
    first, second = made.factory.stacks
    alone = InlineExecutor(made)
    layout = Layout(((*second, 4), first), 1, 0)
    spread = RayExecutor(made, layout, pool)
    found = []
    for executor in (alone, spread):
        executor.start()
        records = Records()
        Simulation(executor, made.plan, tmp_path / str(len(found)), records).run()
        rounds = [(record.evaluations, record.drift) for record in records.records]
        found.append(({**states(executor), "server": executor.server_numbers()}, rounds, records.joined))
    agree(*found)


@pytest.mark.parametrize("shards", ["partition=dirichlet", "partition=iid"])
def test_few_steps_are_taken_alone(shards: str, double: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with smaller batches whose size fewer than four clients have, once per epoch."""
    taken: list[int] = []
    step = Stack._step_alone
    monkeypatch.setattr(Stack, "_step_alone", lambda self, *given: (taken.append(1), step(self, *given))[1])
    made = prepared(*STACKED, "clients=12", "lockstep=true", "lockstep_clients=12", shards)
    made_run, _ = run(made, tmp_path)
    last = Counter(len(rows) % 8 for rows in made.partition.train)
    expected = 2 * sum(count for size, count in last.items() if size and count < 4)
    assert len(taken) == expected < 24
    widths = {key[-1][0] for lockstep in made_run.host.locksteps.values() for key in lockstep.traces}
    assert widths <= {12, 8, 4, 2, 1}


def test_not_a_number_stays_in_its_row(double: None, tmp_path: Path) -> None:
    """Rows without a client compute on the first example of the stack; here it is not a number."""
    made = prepared(*STACKED, "clients=6", "lockstep=true", "lockstep_clients=6", "on_nonfinite=keep")
    first = made.factory.stacks[0][0]
    data = exact(made.dataset)
    data.x[made.partition.train[first][0]] = np.nan
    executor = inline(replace(made, dataset=data))
    Simulation(executor, made.plan, tmp_path, Records()).run()
    for client, state in states(executor).items():
        assert all(bool(value.isfinite().all()) for value in state.values()) == (client != first), client
