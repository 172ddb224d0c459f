"""FedCAC: marks, overlaps and collaborators over rounds by hand, and its special cases."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import NAMES, SIZES, Arrays, batches, close, evaluates, gradient, mean, plus, scores, started, values
from support import World, normed, rounds, run_cohorts, same, states, uplinks_of, world

from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedcac import FedCAC
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.servers.fedavg import FedAvg as Mean
from pflsim.servers.fedcac import FedCAC as Server

ALL = (0, 1, 2, 3)
TRAINING = Training(lr=0.2, batch_size=4)


def fedcac(tau: float = 0.4, beta: int = 3, **given: Any) -> World:
    return world(partial(FedCAC, tau=tau), Server(beta=beta), **{"training": TRAINING, **given})


def marked(start: Arrays, end: Arrays, tau: float) -> list[np.ndarray]:
    found = []
    for a, b in zip(start, end, strict=True):
        sensitivity = abs((b - a) * b).ravel()
        mask = np.zeros(sensitivity.size, bool)
        mask[sorted(range(mask.size), key=lambda e: (-sensitivity[e], e))[: int(tau * mask.size)]] = True
        found.append(mask.reshape(a.shape))
    return found


def customised(ends: dict[int, Arrays], marks: dict[int, list[np.ndarray]], progress: float) -> dict[int, Arrays]:
    """u_i of every client, by pairs."""
    flat = {i: np.concatenate([m.ravel() for m in own]) for i, own in marks.items()}
    overlap = {(i, j): 1 - (a ^ b).sum() / (a.sum() + b.sum()) for i, a in flat.items() for j, b in flat.items()}
    others = [value for (i, j), value in overlap.items() if i != j]
    threshold = np.mean(others) + progress * (max(others) - np.mean(others))
    found = {}
    for i in ends:
        members = [j for j in ends if j == i or overlap[i, j] >= threshold - 1e-12]
        found[i] = mean([ends[j] for j in members], [1] * len(members))
    return found


def test_rounds_by_hand() -> None:
    """All clients, then three, then all, past β; an absent client keeps what it has marked."""
    tau, beta = 0.4, 3
    with started(fedcac(tau, beta)) as executor:
        g = values(executor.server.state.weights)
        own, marks, u = [g] * 4, [[np.zeros(w.shape, bool) for w in g]] * 4, dict[int, Arrays]()
        for t, cohort in enumerate((ALL, (0, 1, 2), ALL, ALL, (0, 1, 3)), 1):

            def received(i: int, g: Arrays = g, u: dict[int, Arrays] = u) -> Arrays:
                return [np.where(m, a, b) for m, a, b in zip(marks[i], u.get(i, own[i]), g, strict=True)]

            if t > 1:
                evaluates(executor, t, lambda i, x: scores(received(i), x), "personal received")
            starts, ends = {i: received(i) for i in cohort}, dict[int, Arrays]()
            for i in cohort:
                w = starts[i]
                for x, y in batches(executor, i, t):
                    w = plus(w, -0.2, gradient(w, x, y))
                ends[i] = w
            executor.fuse(executor.run(TrainTask(t), executor.send(cohort)))
            for i in cohort:
                own[i], marks[i] = ends[i], marked(starts[i], ends[i], tau)
            g = mean([*ends.values()], [SIZES[i] for i in cohort])
            u = customised(ends, {i: marks[i] for i in cohort}, t / beta)
            assert (t > beta) == all(np.array_equal(a, b) for i in cohort for a, b in zip(u[i], ends[i], strict=True))
            for i, state in states(executor).items():
                close(values(state), own[i])
                for name, mask in zip(NAMES, marks[i], strict=True):
                    np.testing.assert_array_equal(state[f"marks.net/{name.replace('.', '/')}"].numpy(), mask)
            close(values(executor.server.state.weights), g)


def test_what_travels() -> None:
    """The merged model to the clients of the last round, g to others; up the model and a bit per entry."""
    executor = run_cohorts(fedcac(0.4), [(0, 1, 2)])
    down, g = executor.server.downlinks(ALL), executor.server.state.weights
    sizes = {key: value.numel() for key, value in g.items()}
    assert down[3].weights is g and not down[3].numbers and down[2].numbers
    for key, value in down[2].weights.items():
        assert 0 < (value != g[key]).sum() <= int(0.4 * sizes[key])
    up = uplinks_of(executor, executor.run(TrainTask(2), executor.send(ALL)))[1]
    assert {key: value.nbytes for key, value in up.extra.items()} == {key: -(-n // 8) for key, n in sizes.items()}
    assert executor.server.rule.join(executor.server.state, 4).weights is g


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_no_marks_is_fedavg_and_all_marks_the_uniform_mean(tau: float) -> None:
    """With all marks the overlaps are equal, so the clients stay together after β; equal sizes make the means equal."""
    given = {"sizes": (9, 9, 9), "training": TRAINING}
    one, other = fedcac(tau, beta=2, **given).inline(), world(FedAvg, Mean(), **given).inline()
    for executor in (one, other):
        rounds(executor, 4, 3)
    net = {c: {k: v for k, v in state.items() if k.startswith("net.")} for c, state in states(one).items()}
    if tau == 0:
        assert same(net, states(other))
    for client, state in states(other).items():
        for key, value in state.items():
            torch.testing.assert_close(net[client][key], value)


def test_equal_clients_stay_equal() -> None:
    made = fedcac(training=Training(lr=0.2, batch_size=20), sizes=(12,) * 4)
    executor = replace(made, partition=replace(made.partition, train=made.partition.train[:1] * 4)).inline()
    rounds(executor, 4, 4)
    first, *others = states(executor).values()
    for key in executor.server.state.weights:
        assert all(torch.allclose(first[key], state[key], atol=1e-6) for state in others)


def test_running_statistics_stay_on_the_clients() -> None:
    executor = fedcac(model=normed, training=Training(lr=0.2, batch_size=5)).inline()
    rounds(executor, 2, 4)
    assert not any("running" in key for key in executor.server.state.weights)
    found = [state["net.body.2.running_mean"] for state in states(executor).values()]
    assert not torch.equal(found[0], found[1])


def test_a_round_with_a_single_client() -> None:
    """Its u_i is its own model."""
    executor = fedcac(1.0).inline()
    executor.fuse(executor.run(TrainTask(1), executor.send([2])))
    own, down = states(executor)[2], executor.server.downlinks([2])[2]
    assert all(torch.equal(value, own[key]) for key, value in down.weights.items()) and down.numbers
