"""FedRoD: the balanced softmax trains what is shared, the personal head trains alone on top of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SIZES, batches, close, features, gradient, mean, plus, scores, slope, started, values
from support import World, dataset, rounds, states, world

from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedrod import FedRoD
from lightning_modules.training import Training
from pflsim.data.dataset import Dataset
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.servers.fedavg import FedAvg as Server

ALL: tuple[int, ...] = (0, 1, 2, 3)


def fedrod(**settings: Any) -> World:
    return world(FedRoD, Server(), **settings)


def apart() -> Dataset:
    """Training examples sorted by class, so that clients lack classes."""
    data = dataset()
    order = np.argsort(data.y[:90], kind="stable")
    return replace(data, x=np.r_[data.x[order], data.x[90:]], y=np.r_[data.y[order], data.y[90:]])


@pytest.mark.parametrize("data", [dataset(), apart()], ids=["all classes", "missing classes"])
def test_two_rounds_by_hand(data: Dataset) -> None:
    """Body and ψ by CE(ψ + log n), φ_i by CE(ψ + φ_i) with everything else fixed, from the same values."""
    eta = 0.4
    with started(fedrod(data=data, training=Training(lr=eta, batch_size=4))) as executor:
        common = values(executor.server.state.weights)
        heads = [common[2:]] * 4
        for t in (1, 2):
            trained = []
            for i in ALL:
                w, (weight, bias) = common, heads[i]
                counts = np.bincount(executor.host.shards[i].train.y.numpy(), minlength=3)
                with np.errstate(divide="ignore"):
                    prior = np.log(counts)
                for x, y in batches(executor, i, t):
                    z = features(w, x)
                    by = slope(scores(w, x) + z @ weight.T + bias, y)
                    w = plus(w, -eta, gradient(w, x, y, prior))
                    weight, bias = weight - eta * by.T @ z, bias - eta * by.sum(0)
                heads[i] = [weight, bias]
                trained.append(w)
            common = mean(trained, SIZES)
        rounds(executor, 2, 4)
        for i, state in states(executor).items():
            close(values(state), trained[i])
            close([state["personal.weight"].numpy(), state["personal.bias"].numpy()], heads[i])
        close(values(executor.server.state.weights), common)


def test_with_equal_class_counts_the_balanced_softmax_is_the_cross_entropy() -> None:
    """Body and ψ are FedAvg's then, and only then."""
    found = []
    for sizes in ((12, 6, 18, 9), (12, 7, 20, 9)):
        for client in (FedRoD, FedAvg):
            with started(world(client, Server(), sizes=sizes, training=Training(lr=0.3, batch_size=4))) as executor:
                rounds(executor, 3, 4)
                found.append(values(executor.server.state.weights))
    close(found[0], found[1])
    assert not np.allclose(found[2][3], found[3][3], atol=1e-4)


def test_the_generic_head_learns_nothing_of_a_class_that_a_client_does_not_have() -> None:
    executor = fedrod(data=apart(), training=Training(lr=0.5, batch_size=4)).inline()
    before = executor.server.state.weights
    executor.run(TrainTask(1), executor.send((0,)))  # rows 0 to 11: class 0 alone
    trained: Any = executor.run(TrainTask(1), executor.send((2,))).states[2]
    here = set(executor.host.shards[2].train.y.tolist())
    assert 0 < len(here) < 3
    for label in range(3):
        moved = not torch.equal(trained["net.head.weight"][label], before["net.head.weight"][label])
        assert moved == (label in here)
    assert not torch.equal(trained["personal.weight"], before["net.head.weight"])


def test_what_is_reported() -> None:
    """Personal: the sum of both heads; global: ψ on the body, as received from the server. By NumPy."""
    with started(fedrod()) as executor:
        rounds(executor, 2, 4)
        state, shared = states(executor)[2], values(executor.server.state.weights)
        test = executor.host.shards[2].test
        x, y = test.x.numpy().reshape(len(test), -1), test.y.numpy()
        own = values(state)
        both = scores(own, x) + features(own, x) @ state["personal.weight"].numpy().T + state["personal.bias"].numpy()
        for model, phase, logits in (("personal", "trained", both), ("global", "received", scores(shared, x))):
            request = EvalRequest(model, phase, (2,), ("test",), 2)  # type: ignore[arg-type]
            (row,) = executor.evaluate(request)
            loss = (np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]).sum()
            assert row.correct == (logits.argmax(1) == y).sum() and row.loss == pytest.approx(loss, rel=1e-9)
