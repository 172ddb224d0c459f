"""FedDyn: its equations, and where it comes to rest."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from by_hand import Arrays, batches, close, gradient, mean, plus, started, values
from support import World, normed, rounds, states, world
from torch import Tensor

from lightning_modules.methods.feddyn import FedDyn
from lightning_modules.training import Training
from pflsim.engine.execution import FinetuneTask, TrainTask
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


def test_a_newcomer_starts_from_the_servers_model() -> None:
    executor = feddyn().inline()
    rounds(executor, 1, 3)
    executor.store(executor.run(FinetuneTask(2, 1), executor.send([3], joining=True)))
    moved = plus(values(states(executor)[3]), -1, values(executor.server.state.weights))
    close(kept(states(executor)[3]), [-0.3 * m for m in moved], 1e-6)


def test_running_statistics_are_the_mean() -> None:
    executor = feddyn(model=normed, training=Training(lr=0.1, batch_size=5)).inline()
    rounds(executor, 2, 4)
    key, state = "net.body.2.running_var", executor.server.state
    assert key not in state.h and "net.body.2.weight" in state.h
    torch.testing.assert_close(state.weights[key], torch.stack([s[key] for s in states(executor).values()]).mean(0))
