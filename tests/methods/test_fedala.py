"""FedALA: the start of a round is mixed element-wise from the own and the received model, with learnt weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import World, rounds, softmax, states, trained_states, world

from lightning_modules.methods.fedala import MAX_PASSES, WINDOW, FedALA
from lightning_modules.nets.cnn import Cnn
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.seeding import seeded_global, torch_generator
from pflsim.servers.fedavg import FedAvg as Server

ALL = (0, 1, 2, 3)
SIZES = (12, 7, 20, 9)
NAMES = ["net.body.fc1.weight", "net.body.fc1.bias", "net.head.weight", "net.head.bias"]
LR, ETA, SHARE = 0.3, 2.0, 0.6
BATCH_NORM = partial(Cnn, channels=[2, 3], kernel=3, padding=1, hidden=6, norm="batch")
Arrays = list[np.ndarray]


def fedala(client: Any = FedALA, training: Training | None = None, model: Any = None, **settings: Any) -> World:
    training = training or Training(lr=LR, batch_size=4)
    return world(partial(client, **settings), Server(), training=training, model=model)


def arrays(examples: Any) -> tuple[np.ndarray, np.ndarray]:
    return examples.x.numpy().reshape(len(examples), -1) / 255.0, examples.y.numpy()


def slopes(w: Arrays, x: np.ndarray, y: np.ndarray) -> tuple[float, Arrays]:
    """Mean cross-entropy of an MLP with one hidden layer, and its gradient, in float64."""
    hidden = x @ w[0].T + w[1]
    z = np.maximum(hidden, 0)
    p = softmax(z @ w[2].T + w[3])
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ w[2]) * (hidden > 0)
    return loss, [back.T @ x, back.sum(0), p.T @ z, p.sum(0)]


def mixture(own: Arrays, received: Arrays, weights: Arrays) -> Arrays:
    """The first layers as received, the last two tensors (one layer) mixed."""
    mixed = [a + (b - a) * w for a, b, w in zip(own[2:], received[2:], weights, strict=True)]
    return [*received[:2], *mixed]


def learnt(
    own: Arrays, received: Arrays, weights: Arrays, x: np.ndarray, y: np.ndarray, rows: np.ndarray, first: bool
) -> tuple[Arrays, int]:
    """The weights after a round's learning, and its number of passes."""
    losses: list[float] = []
    while not losses or (first and not (len(losses) > 10 and np.std(losses[-10:]) < 0.1)):
        total = 0.0
        for start in range(0, len(rows), 4):
            part = rows[start : start + 4]
            loss, found = slopes(mixture(own, received, weights), x[part], y[part])
            total += loss * len(part) / len(rows)
            gaps = [b - a for a, b in zip(own[2:], received[2:], strict=True)]
            moved = zip(weights, found[2:], gaps, strict=True)
            weights = [np.clip(w - ETA * g * gap, 0, 1) for w, g, gap in moved]
        losses.append(total)
    return weights, len(losses)


def test_four_rounds_by_hand() -> None:
    """Starts, W, local training and the mean in NumPy float64; and the loss of the model that the next round starts."""
    w = fedala(eta=ETA, share=SHARE)
    executor, initial = w.inline(), w.factory.build().state_dict()
    common = [initial[k].double().numpy().copy() for k in NAMES]
    own = {c: [v.copy() for v in common] for c in ALL}
    weights = {c: [np.ones_like(v) for v in common[2:]] for c in ALL}
    moved = False

    def start(client: int, t: int, stream: str) -> tuple[Arrays, Arrays]:
        count = math.ceil(SHARE * SIZES[client])
        with seeded_global(0, stream, client, t):
            rows = torch.randperm(SIZES[client]).numpy()[:count]
        x, y = arrays(executor.host.shards[client].train)
        if t == 1:
            return common, weights[client]
        found, passes = learnt(own[client], common, weights[client], x, y, rows, first=t == 2)
        assert passes == (11 if t == 2 else 1)
        return mixture(own[client], common, found), found

    for t in (1, 2, 3):
        executor.fuse(executor.run(TrainTask(t), executor.send(ALL)))
        for client in ALL:
            trained, weights[client] = start(client, t, "train")
            x, y = arrays(executor.host.shards[client].train)
            order = torch.randperm(SIZES[client], generator=torch_generator(0, "batches", client, t)).numpy()
            for first in range(0, SIZES[client], 4):
                rows = order[first : first + 4]
                trained = [v - LR * g for v, g in zip(trained, slopes(trained, x[rows], y[rows])[1], strict=True)]
            own[client] = trained
            state = states(executor)[client]
            for name, value in zip(NAMES, trained, strict=True):
                np.testing.assert_allclose(state[name].numpy(), value, rtol=1e-3, atol=2e-5)
            for name, value in zip(NAMES[2:], weights[client], strict=True):
                found = state["weights." + name.replace(".", "/")].numpy()
                np.testing.assert_allclose(found, value, rtol=1e-3, atol=2e-5)
                moved = moved or bool(((value > 0.01) & (value < 0.99)).any())
        shares = np.array(SIZES) / sum(SIZES)
        common = [np.einsum("k,k...->...", shares, np.stack([own[c][i] for c in ALL])) for i in range(4)]
    assert moved, "some weights are neither 0 nor 1"
    for row in executor.evaluate(EvalRequest("personal", "received", ALL, ("test",), 4)):
        begun, _ = start(row.client, 4, "evaluate")
        x, y = arrays(executor.host.shards[row.client].test)
        assert row.loss == pytest.approx(slopes(begun, x, y)[0] * len(y), rel=1e-3)


# Must hold --------------------------------------------------------------------------------------------------------


def nets(w: World, count: int = 3) -> dict[int, dict[str, torch.Tensor]]:
    executor = w.inline()
    rounds(executor, count, 4, fraction=0.75)
    return {c: {k: v for k, v in s.items() if k.startswith("net.")} for c, s in states(executor).items()}


@pytest.mark.parametrize("p", [1, 2])
def test_layers_that_are_not_mixed_start_as_received(p: int) -> None:
    w = fedala(p=p)
    executor = w.inline()
    rounds(executor, 2, 4)
    module, down = w.factory.build(), executor.downlink(executor.send([2]).downlinks[2])
    module.load_state_dict(dict(states(executor)[2]))
    module.receive(down)
    module.before_training(executor.host.shards[2])
    found = {k for k, v in module.state_dict().items() if k in down.weights and not torch.equal(v, down.weights[k])}
    assert found and found <= set(NAMES[4 - 2 * p :]), "only mixed layers differ from the received ones"
    low, high = (torch.minimum, torch.maximum)
    for key in found:
        a, b, mixed = states(executor)[2][key], down.weights[key], module.state_dict()[key]
        assert ((low(a, b) - 1e-6 <= mixed) & (mixed <= high(a, b) + 1e-6)).all()


def test_weights_stay_in_their_interval_and_are_private() -> None:
    executor = fedala(eta=1000.0).inline()
    rounds(executor, 3, 4)
    found = [v for s in states(executor).values() for k, v in s.items() if k.startswith("weights.")]
    assert all(((v >= 0) & (v <= 1)).all() for v in found) and any((v == 0).any() for v in found)
    trained = executor.run(TrainTask(4), executor.send(ALL))
    sent = [up for handle in trained.uplinks for up in executor.uplinks(handle)]
    assert all(set(up.weights) == set(NAMES) and not up.extra for up in sent)


# The number of passes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threshold", "passes"), [(100.0, WINDOW + 1), (1e-300, MAX_PASSES)])
def test_the_first_learning_lasts_until_the_losses_are_alike(threshold: float, passes: int) -> None:
    """At most `MAX_PASSES`; each later one is a single pass."""
    w = fedala(threshold=threshold, share=1.0)
    executor = w.inline()
    rounds(executor, 1, 4)
    module, own, seen = w.factory.build(), executor.host.shards[0], []
    real = module._step  # type: ignore[operator]
    module._step = lambda *a: seen.append(1) or real(*a)  # type: ignore[assignment]
    module.load_state_dict(dict(states(executor)[0]))
    for expected in (passes * 3, 3):  # 12 examples make 3 mini-batches
        module.receive(executor.downlink(executor.send([0]).downlinks[0]))
        module.before_training(own)
        assert len(seen) == expected
        seen.clear()
        with torch.no_grad():
            module.net.head.weight.add_(0.1)  # type: ignore[operator]


def test_an_absent_client_begins_later() -> None:
    """In its own first round a late client differs from the received model, and learns until it settles."""
    executor = fedala().inline()
    executor.fuse(executor.run(TrainTask(1), executor.send([0, 1])))
    after = trained_states(executor, executor.run(TrainTask(2), executor.send(ALL)))
    assert bool(after[3]["settled"]) and not bool(states(executor)[1]["settled"])


def test_learning_leaves_running_statistics_alone() -> None:
    w = fedala(model=BATCH_NORM)
    executor = w.inline()
    rounds(executor, 1, 4)
    module, down = w.factory.build(), executor.downlink(executor.send([2]).downlinks[2])
    module.load_state_dict(dict(states(executor)[2]))
    module.receive(down)
    module.before_training(executor.host.shards[2])
    statistics = [k for k in down.weights if "running" in k]
    assert statistics and all(torch.equal(module.state_dict()[k], down.weights[k]) for k in statistics)
