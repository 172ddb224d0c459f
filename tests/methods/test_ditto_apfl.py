"""Ditto: w is FedAvg's, v is pulled towards w as received; v is what counts."""

from functools import partial
from typing import Any

import by_hand
import numpy as np
import pytest
import torch
from by_hand import SIZES, batches, close, evaluates, examples, gradient, mean, plus, scores, sgd, started, values
from support import ALL, World, normed, rounds, states, world

from lightning_modules.methods.apfl import APFL
from lightning_modules.methods.ditto import Ditto
from lightning_modules.training import Training
from pflsim.servers.fedavg import FedAvg as Server


def test_two_rounds_by_hand() -> None:
    """w and v of all clients, the server's mean, and the two models that are reported."""
    lr, lam = 0.4, 1.5
    with started(world(partial(Ditto, lam=lam), Server(), training=Training(lr=lr, batch_size=4))) as executor:
        common = values(executor.server.state.weights)
        v = [common] * 4
        for t in (1, 2):
            for client in range(4):
                for x, y in batches(executor, client, t):
                    slope = plus(gradient(v[client], x, y), lam, plus(v[client], -1, common))
                    v[client] = plus(v[client], -lr, slope)
            common = mean([sgd(executor, client, t, common, lr) for client in range(4)], SIZES)
        rounds(executor, 2, 4)
        for client, state in states(executor).items():
            close(values(state, "personal"), v[client])
        close(values(executor.server.state.weights), common)
        evaluates(executor, 2, lambda client, x: scores(v[client], x))
        evaluates(executor, 2, lambda client, x: scores(common, x), "global received")


def apfl(alpha: float = 0.6, adaptive: bool = False, **settings: Any) -> World:
    return world(partial(APFL, alpha=alpha, adaptive=adaptive), Server(), **settings)


@pytest.mark.parametrize(("adaptive", "eta"), [(False, 0.4), (True, 0.4), (True, 8.0)])
def test_three_rounds_by_hand(adaptive: bool, eta: float) -> None:
    """w, v and α of all clients, with w and v stepping from the same values, and the mixture that is reported."""
    decay = 0.5
    with started(apfl(0.6, adaptive, training=Training(lr=eta, lr_decay=decay, batch_size=4))) as executor:
        common = values(executor.server.state.weights)
        local: list[by_hand.Arrays] = [common] * 4
        alphas = [0.6] * 4
        for t in (1, 2, 3):
            rate, trained = eta * decay ** (t - 1), []
            for i in ALL:
                w, v, alpha = common, local[i], alphas[i]
                if adaptive:
                    by = gradient(plus(w, alpha, plus(v, -1, w)), *examples(executor, i))
                    product = sum(((a - b) * g).sum() for a, b, g in zip(v, w, by, strict=True))
                    alphas[i] = alpha = float(np.clip(alpha - rate * product, 0, 1))
                for x, y in batches(executor, i, t):
                    mixed = plus(w, alpha, plus(v, -1, w))
                    w, v = plus(w, -rate, gradient(w, x, y)), plus(v, -rate * alpha, gradient(mixed, x, y))
                local[i] = v
                trained.append(w)
            common = mean(trained, SIZES)
        rounds(executor, 3, 4)
        found = states(executor)
        for i in ALL:
            close(values(found[i], "personal"), local[i])
            close(values(found[i]), trained[i])
            assert float(found[i]["alpha"]) == pytest.approx(alphas[i], rel=1e-10)
        close(values(executor.server.state.weights), common)
        mixtures = [plus(w, a, plus(v, -1, w)) for w, v, a in zip(trained, local, alphas, strict=True)]
        evaluates(executor, 3, lambda i, x: scores(mixtures[i], x))
        evaluates(executor, 3, lambda i, x: scores(common, x), "global received")
    assert bool({0.0, 1.0} & {*alphas}) == (eta == 8.0) and (len(set(alphas)) > 1) == adaptive


def test_the_step_of_alpha_leaves_running_statistics() -> None:
    executor = apfl(adaptive=True, model=normed, training=Training(lr=0.1, batch_size=5)).inline()
    rounds(executor, 2, 4)
    module = executor.host.module
    module.load_state_dict(states(executor)[1])
    before = {k: v.clone() for k, v in module.state_dict().items()}
    module.before_training(executor.host.shards[1])
    assert {k for k, v in module.state_dict().items() if not torch.equal(v, before[k])} <= {"alpha"}
