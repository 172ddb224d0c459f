"""Clients that are held out of the training: what they are sent, how they train, and that nobody else notices."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from support import World, dataset, prepared, rounds, same, world
from torch import Tensor, nn

import pflsim
from lightning_modules.base import ClientModule
from lightning_modules.contract.checks import states
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedfomo import FedFomo
from lightning_modules.methods.per_fedavg import PerFedAvg
from lightning_modules.methods.pfedcfr import PFedCFR
from lightning_modules.methods.pfedme import PFedMe
from lightning_modules.nets.net import Net
from lightning_modules.phases import Phase, Schedule
from lightning_modules.training import Training
from pflsim.analysis.runs import judged_on
from pflsim.config.settings import TaskChoice
from pflsim.data.federated import Examples
from pflsim.engine.execution import EvalRequest, FinetuneTask, Sent, TrainTask
from pflsim.errors import SettingsError
from pflsim.messages import Message
from pflsim.params import BODY, HEAD
from pflsim.seeding import newcomer_rows
from pflsim.servers.base import ServerRule
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.fedfomo import FedFomo as FedFomoServer
from pflsim.servers.fedfomo import candidates
from pflsim.servers.pfedcfr import PFedCFR as PFedCFRServer
from pflsim.servers.pfedme import PFedMe as PFedMeServer
from pflsim.tasks.task import Task


def fewer(w: World, clients: int) -> World:
    """The same, but the server knows of the first clients only."""
    return replace(w, federation=replace(w.federation, clients=w.federation.clients[:clients]))


JOINING = EvalRequest("personal", "received", (3,), ("test",), 3, joining=True)


def summed_loss(net: nn.Module, examples: Examples) -> float:
    x, y = examples.batch(slice(None))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(net.eval()(x), y, reduction="sum"))


def net_of(w: World, values: Mapping[str, Tensor], prefix: str = "net.") -> Net:
    net = w.factory.build().net
    net.load_state_dict({k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)})
    return net


def welcomed(client: Any, rule: ServerRule[Any]) -> tuple[World, InlineExecutor, Sent[Any], float]:
    """Client 3 after some rounds of the other three: what it is sent, and its loss as received."""
    w = fewer(world(client, rule, training=Training(lr=0.05, batch_size=4)), 3)
    executor = w.inline()
    rounds(executor, 3, 3)
    sent = executor.send([3], joining=True)
    (row,) = executor.evaluate(JOINING, sent)
    return w, executor, sent, row.loss


def test_a_newcomer_of_pfedme_is_evaluated_with_theta() -> None:
    """As received θ = w; after fine-tuning it is θ and no longer w."""
    w, executor, sent, received = welcomed(PFedMe, PFedMeServer())
    shard, common = executor.host.shards[3], executor.server.state.weights
    assert received == pytest.approx(summed_loss(net_of(w, common), shard.test), rel=1e-5)
    executor.store(executor.run(FinetuneTask(4, 2), sent))
    (row,) = executor.evaluate(replace(JOINING, phase="trained"))
    state = executor.host.states[3]
    theta = {k.replace("/", "."): v for k, v in state.items()}
    assert row.loss == pytest.approx(summed_loss(net_of(w, theta, "theta."), shard.test), rel=1e-5)
    assert row.loss != pytest.approx(summed_loss(net_of(w, state), shard.test), rel=1e-3)


def test_a_newcomer_of_fedfomo_weighs_its_candidates() -> None:
    """It starts from the initial model and moves by max(0, u_n)/Σ max(0, u) towards every candidate."""
    w, executor, sent, received = welcomed(FedFomo, FedFomoServer(models=2))
    shard, start = executor.host.shards[3], w.federation.initial
    offered = candidates(executor.downlink(sent.downlinks[3]))
    assert len(offered) == 2
    loss = summed_loss(net_of(w, start), shard.val)
    u = []
    for model in offered.values():
        distance = np.sqrt(sum(((model[k] - start[k]).double().numpy() ** 2).sum() for k in start))
        u.append(max(0.0, (loss - summed_loss(net_of(w, model), shard.val)) / len(shard.val) / distance))
    shares = np.array(u) / sum(u)
    mixed = {
        k: v + sum(float(s) * (m[k] - v) for s, m in zip(shares, offered.values(), strict=True))
        for k, v in start.items()
    }
    expected = summed_loss(net_of(w, mixed), shard.test)
    assert received == pytest.approx(expected, rel=1e-5)
    assert abs(expected - summed_loss(net_of(w, start), shard.test)) > 1e-2
    executor.store(executor.run(FinetuneTask(4, 0), sent))
    for key, value in mixed.items():
        torch.testing.assert_close(executor.host.states[3][key], value, rtol=1e-4, atol=1e-6)


def test_of_a_table_of_models_a_newcomer_is_sent_the_mean() -> None:
    client = partial(PFedCFR, alpha=100.0, r="body", unit="module")
    executor = fewer(world(client, PFedCFRServer(alpha=100.0, sigma=1e3)), 3).inline()
    rounds(executor, 3, 3)
    message, state = executor.server.downlinks([3], joining=True)[3], executor.server.state
    assert len(state.table) == 3 and set(message.weights) == set(state.table[0])
    for key, value in message.weights.items():
        expected = np.mean([state.table[i][key].double().numpy() for i in range(3)], axis=0)
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-6, atol=1e-8)


class TwoPhases(ClientModule):
    """A head for three epochs, then a body for as long as the run says."""

    def schedule(self) -> Schedule:
        return Phase("head", trainable=HEAD, epochs=3), Phase("body", trainable=BODY)


SCHEDULES: list[dict[str, Any]] = [
    {"lr_decay": 0.5}, {"lr_schedule": "cosine", "rounds": 2}, {"lr_schedule": "step", "lr_decay": 0.5, "lr_step": 1},
    {"lr_warmup": 9},
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("client", "own"), [(FedAvg, 0), (TwoPhases, 3)])
def test_fine_tuning_is_local_training_of_so_many_epochs(client: Any, own: int, schedule: dict[str, Any]) -> None:
    """The run's length and schedule play no part; a phase's own length stays."""
    plain = Training(lr=0.1, batch_size=4, local_steps=50)
    long = replace(plain, **schedule)
    w = world(client, FedAvgServer(), training=long)
    module, down = w.inline().host.module, Message(weights=w.federation.initial)
    found, once = w.inline(), world(client, FedAvgServer(), training=replace(plain, local_steps=None)).inline()
    tuned = found.host.run(FinetuneTask(2, 1), {3: down})[3].state
    assert same({3: tuned}, {3: once.host.run(TrainTask(2), {3: down})[3].state})
    assert found.host.module.training_settings == module.training_settings == long
    if not own:
        twice = world(client, FedAvgServer(), training=replace(plain, local_steps=None, local_epochs=2)).inline()
        tuned = found.host.run(FinetuneTask(2, 2), {3: down})[3].state
        for key, value in twice.host.run(TrainTask(2), {3: down})[3].state.items():
            torch.testing.assert_close(tuned[key], value)


def test_rounds_are_drawn_from_those_who_train() -> None:
    made = prepared("method=fedavg", "clients=6", "fraction=0.5", "rounds=3", "eval.holdout_clients=2")
    assert made.plan.newcomers == (4, 5) and made.plan.clients == len(made.federation.clients) == 4
    assert all(set(cohort) <= set(range(4)) and len(cohort) == 2 for cohort in made.plan.cohorts)


BALANCED = Task("classification", 2, TaskChoice(class_weights="balanced_client"))


@pytest.mark.parametrize(("client", "task"), [(FedAvg, BALANCED), (PerFedAvg, Task("classification", 2))])
def test_of_few_rows_of_a_newcomer_the_others_have_no_effect(client: Any, task: Task) -> None:
    """Neither on class weights, nor on what a method does before an evaluation."""
    training = Training(lr=0.05, batch_size=4, task=task)
    executor = fewer(
        world(client, FedAvgServer(), training=training, data=dataset(classes=2, per_class=60)), 3
    ).inline()
    rounds(executor, 2, 3)
    executor.commit()
    sent, host, before = executor.send([3], joining=True), executor.host, states(executor)

    def results() -> list[Any]:
        found = executor.evaluate(replace(JOINING, rows=5, recalibrate=True), sent)
        executor.store(executor.run(FinetuneTask(4, 2, 5), sent))
        found += executor.evaluate(replace(JOINING, phase="trained", rows=5))
        executor.rollback()
        return [row.loss for row in found]

    def flip(rows: Tensor) -> None:
        own = host.shards[3]
        y = own.train.y.clone()
        y[rows] = 1 - y[rows]
        host.shards[3] = replace(own, train=replace(own.train, y=y))

    order, first = newcomer_rows(0, 3, host.shards[3].num_examples), results()
    flip(order[5:])
    assert results() == first and same(before, states(executor))
    flip(order[4:5])
    assert all(a != b for a, b in zip(results(), first, strict=True))


def test_results_after_few_rows_are_recorded_and_change_no_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"a": rng.normal(size=80), "site": np.repeat([*"bcad"], 20)})
    table = pflsim.Table(frame.assign(y=frame["a"] + rng.normal(size=80)), label="y", client="site")
    found: dict[str, dict[str, list[Any]]] = {}
    for name, rows in {"none": [], "one": [6], "several": [4, 6, 500]}.items():
        newcomers = {"holdout_clients": ["a", "c"], "newcomer_rows": rows}
        run = pflsim.run(
            data=table, method="fedper", eval=newcomers, rounds=1, lr=0.01, executor="inline", progress="none",
            run_dir=tmp_path / name,
        )  # fmt: skip
        new = run.per_client().query("model == 'newcomer'")
        found[name] = {
            phase: [each[["name", "split", "total", "rmse"]].to_numpy().tolist()]
            for phase, each in new.groupby("phase")
        }
    assert {*found["none"]} == {"received", "trained"}
    few = {f"{how}_{n}" for how in ("trained", "recalibrated") for n in (4, 6)}
    assert {*found["several"]} == {"received", "trained", "received_all", *few}
    for name in ("none", "one"):
        assert found[name] == {phase: found["several"][phase] for phase in found[name]}
    assert {name: total for name, _, total, _ in found["several"]["received_all"][0]} == {"a": 20, "c": 20}
    assert run.summary["newcomers"]["trained_4"]["clients"] == 2
    tested = [rmse for _, split, _, rmse in found["several"]["trained_4"][0] if split == "test"]
    assert judged_on(run, "new_trained_4").mean() == pytest.approx(np.mean(tested))
    for wrong in ("new_trained_500", "trained_4"):
        with pytest.raises(SettingsError, match=f"{wrong}.*new_recalibrated_4"):
            judged_on(run, wrong)
