"""Ditto: w is FedAvg's, v is pulled towards w as received; v is what counts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import World, rounds, same, softmax, states, world
from torch import nn

from lightning_modules.methods.ditto import Ditto
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.nets.mlp import Mlp
from lightning_modules.nets.net import Net
from lightning_modules.phases import Alternate, Schedule
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest
from pflsim.seeding import torch_generator
from pflsim.servers.fedavg import FedAvg as Server

ALL = (0, 1, 2, 3)
Found = dict[int, dict[str, torch.Tensor]]


def ditto(client: Any = Ditto, lam: float = 0.7, **settings: Any) -> World:
    return world(partial(client, lam=lam), Server(), **settings)


def after(w: World, count: int = 3) -> Found:
    executor = w.inline()
    rounds(executor, count, 4, fraction=0.75)
    return states(executor)


class Swapped(Ditto):
    def schedule(self) -> Schedule:
        (both,) = super().schedule()
        assert isinstance(both, Alternate)
        return (Alternate(both.phases[::-1], every="batch"),)


def test_the_order_of_the_two_steps_does_not_matter() -> None:
    assert same(after(ditto()), after(ditto(Swapped)))


def gradient(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of softmax(x·Wᵀ), [C, 17]."""
    return (softmax(x @ weights.T) - y).T @ x / len(x)


def test_two_rounds_by_hand() -> None:
    """Softmax regression in NumPy float64: w and v of all clients, and the server's mean."""
    lr, lam, sizes = 0.4, 1.5, (12, 7, 20, 9)
    w = ditto(lam=lam, model=partial(Mlp, hidden=[]), training=Training(lr=lr, batch_size=4))
    executor = w.inline()
    rounds(executor, 2, 4)
    keys = ("net.head.weight", "net.head.bias")
    initial = np.column_stack([w.federation.initial[k].double().numpy() for k in keys])  # [C, 17]
    common, v = initial.copy(), {c: initial.copy() for c in ALL}
    for t in (1, 2):
        trained = []
        for client in ALL:
            own = executor.host.shards[client].train
            x = np.column_stack([own.x.numpy().reshape(len(own), -1) / 255.0, np.ones(len(own))])
            permutation = torch.randperm(len(own), generator=torch_generator(0, "batches", client, t)).numpy()
            y, mine = np.eye(3)[own.y.numpy()], common.copy()
            for start in range(0, len(own), 4):
                rows = permutation[start : start + 4]
                mine = mine - lr * gradient(mine, x[rows], y[rows])
                v[client] = v[client] - lr * (gradient(v[client], x[rows], y[rows]) + lam * (v[client] - common))
            trained.append(mine)
        common = np.einsum("k,kij->ij", np.array(sizes) / sum(sizes), np.stack(trained))
    found = states(executor)
    for client in ALL:
        personal = np.column_stack([found[client]["personal" + k.removeprefix("net")].numpy() for k in keys])
        np.testing.assert_allclose(personal, v[client], rtol=1e-4, atol=2e-6)
    mean = np.column_stack([executor.server.state.weights[k].numpy() for k in keys])
    np.testing.assert_allclose(mean, common, rtol=1e-4, atol=2e-6)


def test_the_personal_model_is_reported_and_the_global_one_beside_it() -> None:
    one, other = ditto().inline(), world(FedAvg, Server()).inline()
    for executor in (one, other):
        rounds(executor, 3, 4)
    requests = [
        EvalRequest(model, phase, ALL, ("test",), 3)
        for model, phase in (("personal", "trained"), ("global", "received"))
    ]  # type: ignore[arg-type]
    personal, common = (one.evaluate(request) for request in requests)
    assert common == other.evaluate(requests[1]), "the global model is w, under FedAvg to the bit"
    assert all(a.loss != b.loss for a, b in zip(personal, common, strict=True))
    module = one.host.factory.build().eval()
    module.load_state_dict(states(one)[2])
    inputs, labels = one.host.shards[2].test.batch(slice(None))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(module.personal(inputs), labels, reduction="sum")  # type: ignore[operator]
    assert personal[2].loss == pytest.approx(float(loss), rel=1e-6)


def normed(input_shape: tuple[int, ...], classes: int) -> Net:
    body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 6), nn.ReLU())
    return Net(body, nn.Linear(6, classes), (6,), classes)


def test_recalibration_is_of_the_received_model() -> None:
    """w's running statistics are measured anew, v keeps its own."""
    training = Training(lr=0.1, batch_size=5, buffers="recalibrate")
    executor = ditto(model=normed, training=training).inline()
    rounds(executor, 2, 4)
    module, own = executor.host.module, executor.host.shards[1]
    module.load_state_dict(states(executor)[1])
    module.recalibrate(own.train)
    inputs, _ = own.train.batch(slice(None))
    found = module.state_dict()
    torch.testing.assert_close(found["net.body.1.running_mean"], inputs.flatten(1).mean(0))
    assert torch.equal(found["personal.body.1.running_mean"], states(executor)[1]["personal.body.1.running_mean"])
    average = world(FedAvg, Server(), model=normed, training=training).inline()
    rounds(average, 2, 4)
    request = EvalRequest("global", "received", ALL, ("test",), 2)
    assert executor.evaluate(request) == average.evaluate(request)
