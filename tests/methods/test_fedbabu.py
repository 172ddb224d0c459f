"""FedBABU: the body under the initial head; the reported model is fine-tuned on a copy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import World, rounds, same, softmax, states, world
from torch import nn

from lightning_modules.methods.fedbabu import FedBABU
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.seeding import seeded_global, torch_generator
from pflsim.servers.fedavg import FedAvg as Server

ALL = (0, 1, 2, 3)
SIZES = (12, 7, 20, 9)
BODY = ["net.body.fc1.weight", "net.body.fc1.bias"]
HEAD = ["net.head.weight", "net.head.bias"]
LR = 0.3
TEST = EvalRequest("personal", "received", ALL, ("test",), 2)


def fedbabu(training: Training | None = None, model: Any = None, **settings: Any) -> World:
    chosen = {k: settings.pop(k) for k in ("finetune", "finetune_epochs") if k in settings}
    training = training or Training(lr=LR, batch_size=4)
    return world(partial(FedBABU, **chosen), Server(), training=training, model=model, **settings)


def normed(input_shape: tuple[int, ...], classes: int) -> Net:
    body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU())
    return Net(body, nn.Linear(6, classes), (6,), classes)


def arrays(examples: Any) -> tuple[np.ndarray, np.ndarray]:
    return examples.x.numpy().reshape(len(examples), -1) / 255.0, examples.y.numpy()


def epoch(w: list[np.ndarray], x: np.ndarray, y: np.ndarray, order: np.ndarray, trained: str) -> list[np.ndarray]:
    """One epoch of SGD of an MLP with one hidden layer, in float64."""
    w1, b1, w2, b2 = w
    for start in range(0, len(order), 4):
        rows = order[start : start + 4]
        hidden = x[rows] @ w1.T + b1
        z = np.maximum(hidden, 0)
        wrong = softmax(z @ w2.T + b2)
        wrong[np.arange(len(rows)), y[rows]] -= 1
        wrong /= len(rows)
        back = (wrong @ w2) * (hidden > 0)
        if trained in ("body", "both"):
            w1, b1 = w1 - LR * back.T @ x[rows], b1 - LR * back.sum(0)
        if trained in ("head", "both"):
            w2, b2 = w2 - LR * wrong.T @ z, b2 - LR * wrong.sum(0)
    return [w1, b1, w2, b2]


@pytest.mark.parametrize("finetune", ["head", "body", "both"])
def test_two_rounds_and_an_evaluation_by_hand(finetune: str) -> None:
    """Bodies, their mean, and the loss of the copy fine-tuned for two epochs, in NumPy float64."""
    w = fedbabu(finetune=finetune, finetune_epochs=2)
    executor = w.inline()
    initial = w.factory.build().state_dict()
    start = [initial[k].double().numpy().copy() for k in BODY + HEAD]
    for t in (1, 2):
        executor.fuse(executor.run(TrainTask(t), executor.send(ALL)))
        ends = []
        for client in ALL:
            own = arrays(executor.host.shards[client].train)
            order = torch.randperm(SIZES[client], generator=torch_generator(0, "batches", client, t)).numpy()
            ends.append(epoch(start, *own, order, "body"))
            for key, value in zip(BODY + HEAD, ends[-1], strict=True):
                np.testing.assert_allclose(states(executor)[client][key].numpy(), value, rtol=1e-4, atol=2e-6)
        shares = np.array(SIZES) / sum(SIZES)
        start = [np.einsum("k,k...->...", shares, np.stack([e[i] for e in ends])) for i in range(2)] + start[2:]
        for key, value in zip(BODY, start, strict=False):
            np.testing.assert_allclose(executor.server.state.weights[key].numpy(), value, rtol=1e-4, atol=2e-6)
    for row in executor.evaluate(TEST):
        own, tuned = arrays(executor.host.shards[row.client].train), start
        with seeded_global(0, "evaluate", row.client, 2):
            orders = [torch.randperm(SIZES[row.client]).numpy() for _ in range(2)]
        for order in orders:
            tuned = epoch(tuned, *own, order, finetune)
        x, y = arrays(executor.host.shards[row.client].test)
        p = softmax(np.maximum(x @ tuned[0].T + tuned[1], 0) @ tuned[2].T + tuned[3])
        assert row.loss == pytest.approx(-np.log(p[np.arange(len(y)), y]).sum(), rel=1e-4)
        assert row.correct == (p.argmax(1) == y).sum()


@pytest.mark.parametrize("init", ["same", "per_client"])
def test_the_head_never_moves_and_is_the_same_for_all(init: str) -> None:
    """Also if values that are not shared are drawn for each client."""
    w = fedbabu(init=init)
    executor, initial = w.inline(), w.factory.build().state_dict()
    rounds(executor, 3, 4, fraction=0.75)
    found = states(executor)
    assert all(torch.equal(state[key], initial[key]) for state in found.values() for key in HEAD)
    assert not any(torch.equal(state[BODY[0]], initial[BODY[0]]) for state in found.values())


def test_fine_tuning_leaves_no_trace() -> None:
    """Evaluated or not, the next rounds end with the same bits; and it changes what is reported."""
    ends, rows = [], []
    for evaluated in (False, True):
        executor = fedbabu(model=normed).inline()
        rounds(executor, 2, 4)
        if evaluated:
            before = states(executor)
            rows = [executor.evaluate(TEST) for _ in range(2)]
            assert rows[0] == rows[1] and same(before, states(executor))
        executor.fuse(executor.run(TrainTask(3), executor.send(ALL)))
        ends.append(states(executor))
    assert same(*ends)
    plain = fedbabu(model=normed, finetune_epochs=0).inline()
    rounds(plain, 2, 4)
    assert all(a.loss != b.loss for a, b in zip(rows[0], plain.evaluate(TEST), strict=True))


def test_the_global_model_is_not_fine_tuned() -> None:
    """It is the mean body with the initial head, whatever the fine-tuning."""
    found = []
    for epochs in (0, 3):
        executor = fedbabu(finetune_epochs=epochs).inline()
        rounds(executor, 2, 4)
        found.append(executor.evaluate(EvalRequest("global", "received", ALL, ("test",), 2)))
    assert found[0] == found[1] and len(found[0]) == 4


@pytest.mark.parametrize(("finetune", "moves"), [("head", False), ("both", True)])
def test_running_statistics_move_only_with_the_body(finetune: str, moves: bool) -> None:
    w = fedbabu(model=normed, finetune=finetune)
    module, own = w.factory.build(), w.inline().host.shards[2]
    before = {k: v.clone() for k, v in module.state_dict().items()}
    module.before_evaluation(own)
    changed = {k for k, v in module.state_dict().items() if not torch.equal(v, before[k])}
    assert ("net.body.2.running_mean" in changed) == moves and set(HEAD) <= changed
