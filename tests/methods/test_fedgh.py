"""FedGH: its equations by NumPy in float64, and what must hold of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import World, dropout_mlp, same, softmax, states, trained_states, world
from torch import nn

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.loop import train
from lightning_modules.methods.fedgh import FedGH
from lightning_modules.methods.local import Local
from lightning_modules.nets.cnn import Cnn, MapCnn
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.errors import SettingsError
from pflsim.seeding import torch_generator
from pflsim.servers.fedgh import FedGH as Server
from pflsim.servers.local import Local as LocalServer

HEAD = ("net.head.weight", "net.head.bias")
ALL = (0, 1, 2, 3)


def fedgh(server: Mapping[str, Any] | None = None, **extra: Any) -> World:
    return world(FedGH, Server(**(server or {})), **extra)


def run(w: World, cohorts: Sequence[Sequence[int]]) -> InlineExecutor:
    executor = w.inline()
    for t, cohort in enumerate(cohorts, start=1):
        executor.fuse(executor.run(TrainTask(t), executor.send(cohort)))
    return executor


def head(executor: InlineExecutor) -> Mapping[str, torch.Tensor]:
    """The server's head."""
    return executor.server.downlinks([0])[0].weights


# Equations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epochs", "size"), [(1, 1), (2, 1), (1, 4), (3, 10)])
def test_the_server_trains_its_head_on_the_class_means(epochs: int, size: int) -> None:
    """θ ← θ − η·∇ℓ(θ; C_ij, j) over all pairs that were sent, for three rounds of real clients."""
    lr = 0.4
    w = fedgh({"server_lr": lr, "server_epochs": epochs, "server_batch": size}, sizes=(12, 2, 1, 9))
    executor = w.inline()
    weight, bias = (w.federation.initial[k].double().numpy() for k in HEAD)
    for t in (1, 2, 3):
        trained = executor.run(TrainTask(t), executor.send(range(4)))
        ups = executor.uplinks(trained.uplinks[0])
        executor.fuse(trained)
        pairs = []
        for up in ups:
            own, state = executor.host.shards[up.client].train, states(executor)[up.client]
            x, y = own.x.numpy().reshape(len(own), -1) / 255.0, own.y.numpy()
            hidden = x @ state["net.body.fc1.weight"].double().numpy().T + state["net.body.fc1.bias"].double().numpy()
            pairs += [(np.maximum(hidden, 0)[y == j].mean(0), j) for j in range(3) if (y == j).any()]
        assert len(pairs) == 3 + 2 + 1 + 3
        z, y = np.stack([m for m, _ in pairs]), np.array([j for _, j in pairs])
        order = torch_generator(0, "global_head", round_number=t - 1)
        for _ in range(epochs):
            turn = torch.randperm(len(y), generator=order).numpy()
            for start in range(0, len(y), size):
                rows = turn[start : start + size]
                p = softmax(z[rows] @ weight.T + bias)
                p[np.arange(len(rows)), y[rows]] -= 1
                weight, bias = weight - lr * p.T @ z[rows] / len(rows), bias - lr * p.mean(0)
        np.testing.assert_allclose(head(executor)[HEAD[0]].numpy(), weight, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(head(executor)[HEAD[1]].numpy(), bias, rtol=1e-4, atol=1e-5)


# Must hold --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"model": dropout_mlp},
        {"model": partial(Cnn, channels=[2], kernel=3, padding=1, hidden=4, norm="batch")},
    ],
)
def test_the_first_round_is_local(extra: dict[str, Any]) -> None:
    """Before round 1 the server's head is the common initial one: to the bit; in round 2 it no longer is."""
    w = fedgh(**extra)
    alone = replace(w, factory=replace(w.factory, client=Local), rule=LocalServer())
    assert same(states(run(w, [ALL])), states(run(alone, [ALL])))
    assert not same(states(run(w, [ALL] * 2)), states(run(alone, [ALL] * 2)))


def test_clients_that_start_differently_share_the_first_head() -> None:
    w = fedgh(init="per_client")
    found = states(w.inline())
    assert all(torch.equal(s[k], w.federation.initial[k]) for s in found.values() for k in HEAD)
    assert not torch.equal(found[0]["net.body.fc1.weight"], found[1]["net.body.fc1.weight"])


def test_a_round_is_full_local_training_under_the_servers_head() -> None:
    """The client's own body, the received head, then everything moves."""
    w = fedgh()
    executor = run(w, [ALL])
    before, received = states(executor)[2], dict(head(executor))
    assert not torch.equal(before[HEAD[0]], received[HEAD[0]])
    module = w.factory.build()
    module.load_state_dict({**before, **received})
    module.round_number = 2
    train(module, executor.host.shards[2].train, torch_generator(0, "batches", 2, 2))
    after = trained_states(executor, executor.run(TrainTask(2), executor.send(range(4))))[2]
    assert all(torch.equal(after[k], v) for k, v in module.state_dict().items())
    assert all(not torch.equal(after[k], v) for k, v in {**before, **received}.items())


def test_there_are_no_global_means() -> None:
    """Nobody is sent them, so that they are not worked out; a trace has the head and the order of its training."""
    executor = run(fedgh(), [ALL])
    assert set(executor.server_numbers()) == {"head/weight", "head/bias", "order"}


# Models -----------------------------------------------------------------------------------------------------------


class NormedHead(Net):
    """A head with running statistics."""

    def __init__(self, shape: tuple[int, ...], classes: int):
        body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 5), nn.ReLU())
        super().__init__(body, nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, classes)), (5,), classes)


def test_running_statistics_in_a_head_stay_with_the_client() -> None:
    executor = run(fedgh(model=NormedHead), [ALL] * 2)
    assert not any("running" in key for key in head(executor)) and "net.head.0.weight" in head(executor)
    found = [s["net.head.0.running_mean"] for s in states(executor).values()]
    after = trained_states(executor, executor.run(TrainTask(3), executor.send([0])))
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(after[0]["net.head.0.running_mean"], found[0])


def test_a_head_moves_no_statistics_of_the_body() -> None:
    """Under every setting of `buffers` they are the client's own, in training and as received."""
    model = partial(Cnn, channels=[2], kernel=3, padding=1, hidden=4, norm="batch")
    found = []
    for buffers in ("aggregate", "local", "recalibrate"):
        executor = run(fedgh(model=model, training=Training(lr=0.1, batch_size=5, buffers=buffers)), [ALL] * 2)  # type: ignore[arg-type]
        received = executor.evaluate(EvalRequest("personal", "received", ALL, ("test",), 3))
        found.append((received, states(executor)))
    assert found[0][0] == found[1][0] == found[2][0]
    assert same(found[0][1], found[1][1]) and same(found[0][1], found[2][1])


class Pooled(Net):
    """A head that needs maps."""

    def __init__(self, shape: tuple[int, ...], classes: int):
        top = nn.Sequential(nn.Conv2d(2, classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        super().__init__(nn.Conv2d(shape[0], 2, 1), top, (2, *shape[1:]), classes)


def test_feature_maps() -> None:
    """Maps are flattened for the class means; a head that cannot take flat ones is refused."""
    executor = run(fedgh(model=partial(MapCnn, hidden_channels=2, channels=3, kernel=3, padding=1)), [ALL] * 2)
    assert set(head(executor)) == {f"net.head.{k}" for k in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")}
    with pytest.raises(SettingsError, match=r"class means.*\[n, 32\]"):
        fedgh(model=Pooled).inline()
