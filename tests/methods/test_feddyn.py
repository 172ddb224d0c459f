"""FedDyn: its equations, and where it comes to rest."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import Arrays, batches, close, gradient, mean, plus, started, values
from support import World, rounds, states, world
from torch import Tensor, nn

from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.feddyn import FedDyn
from lightning_modules.nets.mlp import Mlp
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.data.dataset import Dataset
from pflsim.engine.execution import FinetuneTask, TrainTask
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.feddyn import FedDyn as Server

ALL: tuple[int, ...] = (0, 1, 2, 3)


def feddyn(alpha: float = 0.3, **settings: Any) -> World:
    return world(partial(FedDyn, alpha=alpha), Server(alpha=alpha), **settings)


def kept(state: dict[str, Tensor]) -> Arrays:
    """h_i in a client's state."""
    found = {k.removeprefix("gradient.").replace("/", "."): v for k, v in state.items() if k.startswith("gradient.")}
    return values(found)


def test_three_rounds_by_hand() -> None:
    """Algorithm 1, with all clients, then two of four, then others."""
    alpha, eta, cohorts = 0.7, 0.2, (ALL, (0, 2), (1, 2))
    with started(feddyn(alpha, training=Training(lr=eta, batch_size=4))) as executor:
        theta = values(executor.server.state.weights)
        zero = [np.zeros_like(v) for v in theta]
        h, own = zero, [zero] * 4
        for t, cohort in enumerate(cohorts, 1):
            trained = []
            for i in cohort:
                w = theta
                for x, y in batches(executor, i, t):
                    slope = plus(gradient(w, x, y), -1, own[i])
                    w = plus(w, -eta, plus(slope, alpha, plus(w, -1, theta)))
                own[i] = plus(own[i], -alpha, plus(w, -1, theta))
                trained.append(w)
            moved = mean([plus(w, -1, theta) for w in trained], [1] * len(cohort))
            h = plus(h, -alpha * len(cohort) / 4, moved)
            theta = plus(mean(trained, [1] * len(cohort)), -1 / alpha, h)
            executor.fuse(executor.run(TrainTask(t), executor.send(cohort)))
        found = states(executor)
        for i in ALL:
            close(kept(found[i]), own[i])
        close(values(executor.server.state.weights), theta)
        close(values(executor.server.state.h), h)
        close(h, mean(own, [1] * 4))


def half_square(scores: Tensor, labels: Tensor) -> Tensor:
    """A quadratic loss of a linear model."""
    return (scores - nn.functional.one_hot(labels, 3)).square().sum(1).mean() / 2


def test_on_a_quadratic_it_comes_to_rest_at_the_optimum_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """By least squares over all examples; FedAvg with the same local steps does not reach it."""
    monkeypatch.setattr("lightning_modules.base.cross_entropy", half_square)
    rng = np.random.default_rng(3)
    y = np.r_[np.repeat(np.arange(3), 8), np.zeros(12, int)]  # two clients with 12 examples each, and the test rows
    x = (rng.normal(size=(36, 2)) + y[:, None]).astype(np.float32)
    data = Dataset("made", x, y, 3, train_size=24, scale=1.0)
    rows, targets = np.column_stack([x, np.ones(36)])[:24].astype(float), np.eye(3)[y[:24]]
    best = np.linalg.lstsq(rows, targets, rcond=None)[0].T
    settings: dict[str, Any] = {"sizes": (12, 12), "data": data, "model": partial(Mlp, hidden=[])}
    settings["training"] = Training(lr=0.2, local_steps=16, batch_size=100)
    gaps = []
    for w in (feddyn(1.0, **settings), world(FedAvg, FedAvgServer(), **settings)):
        with started(w) as executor:
            rounds(executor, 22, 2)
            weights, found = executor.server.state.weights, states(executor)
            learnt = np.column_stack([weights["net.head.weight"].numpy(), weights["net.head.bias"].numpy()])
            gaps.append(np.abs(learnt - best).max())
            if isinstance(w.rule, Server):
                for client, part in enumerate((slice(0, 12), slice(12, 24))):
                    slope = (rows[part] @ best.T - targets[part]).T @ rows[part] / 12
                    kept_there = found[client]["gradient.net/head/weight"].numpy()
                    np.testing.assert_allclose(kept_there, slope[:, :2], atol=2e-3)
    assert gaps[0] < 2e-3 < 0.02 < gaps[1], gaps


def test_a_newcomer_starts_from_the_servers_model() -> None:
    executor = feddyn().inline()
    rounds(executor, 1, 3)
    executor.store(executor.run(FinetuneTask(2, 1), executor.send([3], joining=True)))
    moved = plus(values(states(executor)[3]), -1, values(executor.server.state.weights))
    close(kept(states(executor)[3]), [-0.3 * m for m in moved], 1e-6)


def normed(input_shape: tuple[int, ...], classes: int) -> Net:
    body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 6), nn.ReLU())
    return Net(body, nn.Linear(6, classes), (6,), classes)


def test_running_statistics_are_the_mean() -> None:
    executor = feddyn(model=normed, training=Training(lr=0.1, batch_size=5)).inline()
    rounds(executor, 2, 4)
    key, state = "net.body.1.running_var", executor.server.state
    assert key not in state.h and "net.body.1.weight" in state.h
    torch.testing.assert_close(state.weights[key], torch.stack([s[key] for s in states(executor).values()]).mean(0))
