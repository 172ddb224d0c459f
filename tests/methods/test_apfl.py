"""APFL: w is FedAvg's, v is trained inside the mixture, and α finds its value."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SIZES, Arrays, batches, close, gradient, mean, plus, scores, started, values
from support import World, rounds, states, world
from torch import nn

from lightning_modules.methods.apfl import APFL
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.servers.fedavg import FedAvg as Server

ALL: tuple[int, ...] = (0, 1, 2, 3)


def apfl(alpha: float = 0.6, adaptive: bool = False, **settings: Any) -> World:
    return world(partial(APFL, alpha=alpha, adaptive=adaptive), Server(), **settings)


@pytest.mark.parametrize("adaptive", [False, True])
def test_three_rounds_by_hand(adaptive: bool) -> None:
    """w, v and α of all clients, with w and v stepping from the same values."""
    eta, decay = 0.4, 0.5
    with started(apfl(0.6, adaptive, training=Training(lr=eta, lr_decay=decay, batch_size=4))) as executor:
        common = values(executor.server.state.weights)
        local: list[Arrays] = [common] * 4
        alphas = [0.6] * 4
        for t in (1, 2, 3):
            rate, trained = eta * decay ** (t - 1), []
            for i in ALL:
                w, v, alpha = common, local[i], alphas[i]
                if adaptive:
                    own = executor.host.shards[i].train
                    mixed = plus(w, alpha, plus(v, -1, w))
                    by = gradient(mixed, own.x.numpy().reshape(len(own), -1), own.y.numpy())
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
    assert (len(set(alphas)) == 4) == adaptive


def test_alpha_stays_between_0_and_1_and_moves_apart() -> None:
    """With a step that overshoots; the first round leaves α, since v = w."""
    w = apfl(0.5, True, training=Training(lr=3.0, batch_size=4))
    executor = w.inline()
    rounds(executor, 1, 4)
    assert all(float(s["alpha"]) == 0.5 for s in states(executor).values())
    executor.fuse(executor.run(TrainTask(2), executor.send(ALL)))
    found = {float(s["alpha"]) for s in states(executor).values()}
    assert all(0 <= alpha <= 1 for alpha in found) and found & {0.0, 1.0}, found


def test_the_mixture_is_reported_and_w_is_the_global_model() -> None:
    """By NumPy; the global results are FedAvg's."""
    with started(apfl(0.3)) as executor:
        rounds(executor, 2, 4)
        state = states(executor)[2]
        mixed = plus(values(state), 0.3, plus(values(state, "personal"), -1, values(state)))
        test = executor.host.shards[2].test
        x, y = test.x.numpy().reshape(len(test), -1), test.y.numpy()
        logits = scores(mixed, x)
        module = executor.host.module.eval()
        module.load_state_dict(state)
        inputs, _ = test.batch(slice(None))
        np.testing.assert_allclose(module.predict(inputs).detach().numpy(), logits, atol=1e-12)
        (row,) = executor.evaluate(EvalRequest("personal", "trained", (2,), ("test",), 2))
        assert row.correct == (logits.argmax(1) == y).sum()
        assert not np.allclose(logits, scores(values(state), x))
    one, other = apfl().inline(), world(FedAvg, Server()).inline()
    for each in (one, other):
        rounds(each, 2, 4)
    request = EvalRequest("global", "received", ALL, ("test",), 2)
    assert one.evaluate(request) == other.evaluate(request)


def normed(input_shape: tuple[int, ...], classes: int) -> Net:
    body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 6), nn.ReLU())
    return Net(body, nn.Linear(6, classes), (6,), classes)


def test_the_step_of_alpha_leaves_running_statistics() -> None:
    executor = apfl(adaptive=True, model=normed, training=Training(lr=0.1, batch_size=5)).inline()
    rounds(executor, 2, 4)
    module = executor.host.module
    module.load_state_dict(states(executor)[1])
    before = {k: v.clone() for k, v in module.state_dict().items()}
    module.before_training(executor.host.shards[1])
    changed = {k for k, v in module.state_dict().items() if not torch.equal(v, before[k])}
    assert changed <= {"alpha"}
