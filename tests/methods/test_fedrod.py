"""FedRoD: the balanced softmax trains what is shared, the personal head trains alone on top of it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from by_hand import SIZES, batches, close, evaluates, features, gradient, mean, plus, scores, slope, started, values
from support import ALL, World, dataset, rounds, states, world

from lightning_modules.methods.fedrod import FedRoD
from lightning_modules.training import Training
from pflsim.data.dataset import Dataset
from pflsim.servers.fedavg import FedAvg as Server


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

        def summed(i: int, x: np.ndarray) -> np.ndarray:
            return scores(trained[i], x) + features(trained[i], x) @ heads[i][0].T + heads[i][1]

        evaluates(executor, 2, summed)
        evaluates(executor, 2, lambda i, x: scores(common, x), "global received")
