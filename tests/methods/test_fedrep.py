"""FedRep: head on the fixed body, then body under the new head; heads never travel."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import World, softmax, states, world
from torch import nn

from lightning_modules.loop import train
from lightning_modules.methods.fedrep import FedRep
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.seeding import torch_generator
from pflsim.servers.fedavg import FedAvg as Server

ALL = (0, 1, 2, 3)
BODY = ["net.body.fc1.weight", "net.body.fc1.bias"]
HEAD = ["net.head.weight", "net.head.bias"]
LR = 0.3


def fedrep(head_epochs: int = 2, **settings: Any) -> World:
    client = {k: settings.pop(k) for k in ("body_epochs",) if k in settings}
    return world(partial(FedRep, head_epochs=head_epochs, **client), Server(), **settings)


def watched(w: World) -> list[tuple[str, set[str]]]:
    """Client 0's steps in a round: the phase, and what changed."""
    executor = w.inline()
    module, own = w.factory.build(), executor.host.shards[0]
    module.receive(executor.downlink(executor.send([0]).downlinks[0]))
    seen: list[tuple[str, set[str]]] = []
    real = module.optimise

    def optimise(batch: Any, step: Any) -> Any:
        before = {k: v.clone() for k, v in module.state_dict().items()}
        terms = real(batch, step)
        seen.append((step.phase.name, {k for k, v in module.state_dict().items() if not torch.equal(v, before[k])}))
        return terms

    module.optimise = optimise  # type: ignore[method-assign]
    train(module, own.train, torch_generator(0, "batches", 0, 1))
    return seen


def normed(input_shape: tuple[int, ...], classes: int) -> Net:
    body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU())
    return Net(body, nn.Linear(6, classes), (6,), classes)


def test_the_head_first_then_the_body() -> None:
    """12 examples make 3 batches of 4; each phase moves its own parameters only."""
    seen = watched(fedrep(head_epochs=3, body_epochs=2))
    assert "".join(name[0] for name, _ in seen) == "h" * 9 + "b" * 6
    assert {name: moved for name, moved in seen} == {"head": set(HEAD), "body": set(BODY)}


@pytest.mark.parametrize(("run", "steps"), [({"local_epochs": 4}, 12), ({"local_steps": 5}, 5), ({}, 3)])
def test_the_body_trains_as_long_as_the_run_says(run: Any, steps: int) -> None:
    seen = watched(fedrep(head_epochs=1, training=Training(lr=LR, batch_size=4, **run)))
    assert "".join(name[0] for name, _ in seen) == "hhh" + "b" * steps


def test_nothing_of_the_body_moves_while_the_head_trains() -> None:
    """Neither weights nor running statistics; they do in the body's phase."""
    seen = watched(fedrep(model=normed, training=Training(lr=LR, batch_size=4)))
    moved = {name: set().union(*(m for n, m in seen if n == name)) for name in ("head", "body")}
    assert moved["head"] == set(HEAD)
    assert {"net.body.2.running_mean", "net.body.2.running_var", "net.body.2.num_batches_tracked"} <= moved["body"]
    assert not moved["body"] & set(HEAD)


def test_a_round_by_hand() -> None:
    """Two epochs of the head, one of the body, and the mean of the bodies, in NumPy float64."""
    w = fedrep(head_epochs=2, training=Training(lr=LR, batch_size=4))
    executor = w.inline()
    executor.fuse(executor.run(TrainTask(1), executor.send(ALL)))
    found, bodies = states(executor), []
    for client in ALL:
        w1, b1, w2, b2 = (w.factory.build().state_dict()[k].double().numpy().copy() for k in BODY + HEAD)
        own = executor.host.shards[client].train
        x, labels = own.x.numpy().reshape(len(own), -1) / 255.0, own.y.numpy()
        order = torch_generator(0, "batches", client, 1)
        for phase in ("head", "head", "body"):
            permutation = torch.randperm(len(own), generator=order).numpy()
            for start in range(0, len(own), 4):
                rows = permutation[start : start + 4]
                hidden = x[rows] @ w1.T + b1
                z = np.maximum(hidden, 0)
                wrong = softmax(z @ w2.T + b2)
                wrong[np.arange(len(rows)), labels[rows]] -= 1
                wrong /= len(rows)
                if phase == "head":
                    w2, b2 = w2 - LR * wrong.T @ z, b2 - LR * wrong.sum(0)
                else:
                    back = (wrong @ w2) * (hidden > 0)
                    w1, b1 = w1 - LR * back.T @ x[rows], b1 - LR * back.sum(0)
        for key, value in zip(BODY + HEAD, (w1, b1, w2, b2), strict=True):
            np.testing.assert_allclose(found[client][key].numpy(), value, rtol=1e-4, atol=2e-6)
        bodies.append((w1, b1))
    for number, key in enumerate(BODY):
        mean = np.einsum("k,k...->...", np.array([12, 7, 20, 9]) / 48, np.stack([body[number] for body in bodies]))
        np.testing.assert_allclose(executor.server.state.weights[key].numpy(), mean, rtol=1e-4, atol=2e-6)
