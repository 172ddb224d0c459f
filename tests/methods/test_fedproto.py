"""FedProto: its equations by NumPy in float64, and what must hold of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import World, softmax, states, trained_states, world

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.fedproto import FedProto
from lightning_modules.prototypes import nearest_scores
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.messages import Message, Prototypes
from pflsim.servers.pfedpm import PFedPM as Server

LR, LAM = 0.3, 2.5
TRAINING = Training(lr=0.1, momentum=0.5, batch_size=4)
COHORTS = ((1, 2), (0, 2), (0, 1, 3), (2, 3))
ALL = (0, 1, 2, 3)
NAMES = ["net.body.fc1.weight", "net.body.fc1.bias", "net.head.weight", "net.head.bias"]


def fedproto(*, training: Training = TRAINING, model: Any = None, data: Any = None, **settings: Any) -> World:
    return world(partial(FedProto, **settings), Server(), training=training, model=model, data=data)


def run(w: World, cohorts: Sequence[Sequence[int]] = COHORTS) -> InlineExecutor:
    executor = w.inline()
    for t, cohort in enumerate(cohorts, start=1):
        executor.fuse(executor.run(TrainTask(t), executor.send(cohort)))
    return executor


def nets(executor: InlineExecutor) -> dict[int, dict[str, torch.Tensor]]:
    """Every client's body and head, buffers included."""
    return {c: {k: v for k, v in s.items() if k.startswith("net.")} for c, s in states(executor).items()}


# Equations --------------------------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    """CE + λ/(B·D)·Σ ‖z − C̄_y‖² (eq. 7) and three steps of its gradient; class 1 has no global mean."""
    rng = np.random.default_rng(3)
    w1, b1, w2, b2 = (rng.normal(0, 0.5, s) for s in ((5, 16), (5,), (3, 5), (3,)))
    means, held = rng.normal(0, 0.5, (3, 5)), np.array([True, False, True])
    module = fedproto(lam=LAM, training=Training(lr=LR, batch_size=8)).factory.build().double()
    with torch.no_grad():
        for name, value in zip(NAMES, (w1, b1, w2, b2), strict=True):
            module.get_parameter(name).copy_(torch.from_numpy(value))
    sent = torch.from_numpy(np.where(held[:, None], means, np.nan))
    module.receive(Message(prototypes=Prototypes(sent, torch.tensor([4, 0, 9]))))
    step = module.make_step(module.schedule()[0])  # type: ignore[arg-type]
    for _ in range(3):
        x, y = rng.random((8, 16)), np.array([0, 1, 2, 2, 1, 0, 0, 2])
        hidden = x @ w1.T + b1
        z = np.maximum(hidden, 0)
        p = softmax(z @ w2.T + b2)
        ce = -np.log(p[np.arange(8), y]).mean()
        pull = np.where(held[y][:, None], z - means[y], 0)
        found = module.optimise((torch.from_numpy(x.reshape(8, 1, 4, 4)), torch.from_numpy(y)), step)
        assert math.isclose(float(found["ce"]), ce, rel_tol=1e-12)
        assert math.isclose(float(found["align"]), LAM * (pull**2).sum() / (8 * 5), rel_tol=1e-12)
        p[np.arange(8), y] -= 1
        back = (p @ w2 / 8 + LAM * 2 / (8 * 5) * pull) * (hidden > 0)
        w1, b1, w2, b2 = (
            w1 - LR * back.T @ x,
            b1 - LR * back.sum(0),
            w2 - LR * p.T @ z / 8,
            b2 - LR * p.sum(0) / 8,
        )
        for name, value in zip(NAMES, (w1, b1, w2, b2), strict=True):
            np.testing.assert_allclose(module.get_parameter(name).detach().numpy(), value, rtol=1e-11, atol=1e-14)


def test_nearest_prototype() -> None:
    """argmin_j ‖z − C̄_j‖₂ (eq. 4) over the classes that have one."""
    rng = np.random.default_rng(5)
    z, means, held = rng.normal(size=(40, 6)), rng.normal(size=(4, 6)), np.array([True, False, True, True])
    means[1] = z.mean(0)  # the nearest to most of them, if it counted
    distances = np.stack([[np.sqrt(((a - c) ** 2).sum()) for c in means] for a in z])
    found = nearest_scores(*(torch.from_numpy(v) for v in (z, means, held))).numpy()
    np.testing.assert_allclose(found[:, held], -distances[:, held], rtol=1e-12)
    np.testing.assert_array_equal(found.argmax(1), np.where(held, distances, np.inf).argmin(1))
    assert (found[:, 1] < found[:, held].min(1)).all() and np.isfinite(found).all()


def test_no_prototype_at_all_is_finite() -> None:
    found = nearest_scores(torch.randn(5, 3), torch.zeros(4, 3), torch.zeros(4, dtype=torch.bool))
    assert found.isfinite().all() and torch.equal(found, found[:1, :1].expand(5, 4))


def test_small_distances_between_large_features_are_exact() -> None:
    """A distance by way of a matrix product would lose them."""
    means = torch.full((30, 8), 1000.0) + torch.arange(30)[:, None] * 0.01
    found = nearest_scores(means, means, torch.ones(30, dtype=torch.bool))
    assert torch.equal(found.argmax(1), torch.arange(30)) and float(found.diagonal().abs().max()) == 0


def test_features_that_are_not_finite_are_not_hidden() -> None:
    """A diverged model must not be credited with a class."""
    found = nearest_scores(torch.tensor([[math.inf, 0.0], [math.nan, 1.0]]), torch.eye(2), torch.tensor([True, False]))
    assert not found.isfinite().all(1).any()


def test_global_means_are_not_shrunk() -> None:
    """Eq. 6 without its division by the number of clients: the mean over all examples of a class, from the uplinks."""
    w = fedproto()
    executor = w.inline()
    trained = executor.run(TrainTask(1), executor.send(range(4)))
    ups = executor.uplinks(trained.uplinks[0])
    executor.fuse(trained)
    down = executor.server.downlinks([0])[0].prototypes
    sent = [up.prototypes for up in ups]
    assert down is not None and all(s is not None for s in sent)
    n = np.stack([s.counts.numpy() for s in sent if s is not None])
    m = np.stack([s.means.double().numpy() for s in sent if s is not None])
    np.testing.assert_allclose(down.means.numpy(), (n[..., None] * m).sum(0) / n.sum(0)[:, None], rtol=1e-6)
    assert down.counts.tolist() == n.sum(0).tolist()
    for up in ups:  # eq. 3, by the trained body
        own, state = executor.host.shards[up.client].train, states(executor)[up.client]
        x, y = own.x.numpy().reshape(len(own), -1) / 255.0, own.y.numpy()
        weight, bias = (state[f"net.body.fc1.{k}"].double().numpy() for k in ("weight", "bias"))
        z = np.maximum(x @ weight.T + bias, 0)
        for j in set(y):
            assert up.prototypes is not None
            np.testing.assert_allclose(up.prototypes.means[j].numpy(), z[y == j].mean(0), rtol=2e-5, atol=1e-6)


# Must hold --------------------------------------------------------------------------------------------------------


def test_evaluated_with_the_newest_means() -> None:
    """Received: the trained body with what the server has fused since; trained: with what it trained with."""
    w = fedproto()
    executor = run(w, (ALL, ALL))
    assert FedProto.reported_phase == "received"
    module, own = w.factory.build(), executor.host.shards[1].test
    newest = executor.server.downlinks([1])[1]
    for phase in ("received", "trained"):
        module.load_state_dict(dict(states(executor)[1]))
        if phase == "received":
            module.receive(newest)
        scores = module.eval().predict(own.batch(slice(None))[0]).detach()
        (row,) = executor.evaluate(EvalRequest("personal", phase, (1,), ("test",)))  # type: ignore[arg-type]
        assert row.loss == pytest.approx(float(torch.nn.functional.cross_entropy(scores, own.y, reduction="sum")))
    assert newest.prototypes is not None
    assert not torch.equal(states(executor)[1]["means"], newest.prototypes.means)
    assert executor.evaluate(EvalRequest("global", "received", ALL, ("test",))) == []


def test_means_are_fixed_while_a_client_trains() -> None:
    w = fedproto()
    executor = run(w, (ALL,))
    down = executor.server.downlinks([0])[0].prototypes
    after = trained_states(executor, executor.run(TrainTask(2), executor.send(range(4))))
    assert down is not None
    assert all(torch.equal(s["means"], down.means) for s in after.values())


def test_rows_of_missing_classes_do_not_matter() -> None:
    module = fedproto().factory.build()
    for fill in (math.nan, 7.0):
        means = torch.ones(3, 5)
        means[1] = fill
        module.receive(Message(prototypes=Prototypes(means, torch.tensor([1, 0, 1]))))
        assert module.state_dict()["means"][1].tolist() == [0.0] * 5
    batch = torch.rand(2, 1, 4, 4), torch.tensor([1, 1])
    assert float(module.objective(batch)["align"].detach()) == 0
    with pytest.raises(ValueError, match="class means"):
        module.receive(Message())
