"""FedProto: its equations by NumPy in float64, and what must hold of it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import NAMES, backward, close, examples, features, losses, plus, scores, slope, values
from support import World, run_cohorts, states, world

from lightning_modules.methods.fedproto import FedProto
from lightning_modules.prototypes import nearest_scores
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.messages import Message, Prototypes
from pflsim.params import load
from pflsim.servers.pfedpm import PFedPM as Server

LR, LAM = 0.3, 2.5
TRAINING = Training(lr=0.1, momentum=0.5, batch_size=4)
ALL = (0, 1, 2, 3)


def fedproto(*, training: Training = TRAINING, model: Any = None, data: Any = None, **settings: Any) -> World:
    return world(partial(FedProto, **settings), Server(), training=training, model=model, data=data)


# Equations --------------------------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    """CE + λ/(B·D)·Σ ‖z − C̄_y‖² (eq. 7) and three steps of its gradient; class 1 has no global mean."""
    rng = np.random.default_rng(3)
    w = [rng.normal(0, 0.5, s) for s in ((5, 16), (5,), (3, 5), (3,))]
    means, held = rng.normal(0, 0.5, (3, 5)), np.array([True, False, True])
    module = fedproto(lam=LAM, training=Training(lr=LR, batch_size=8)).factory.build().double()
    load(module, {f"net.{name}": torch.from_numpy(value) for name, value in zip(NAMES, w, strict=True)})
    sent = torch.from_numpy(np.where(held[:, None], means, np.nan))
    module.receive(Message(prototypes=Prototypes(sent, torch.tensor([4, 0, 9]))))
    step = module.make_step(module.schedule()[0])  # type: ignore[arg-type]
    for _ in range(3):
        x, y = rng.random((8, 16)), np.array([0, 1, 2, 2, 1, 0, 0, 2])
        pull = np.where(held[y][:, None], features(w, x) - means[y], 0)
        found = module.optimise((torch.from_numpy(x.reshape(8, 1, 4, 4)), torch.from_numpy(y)), step)
        assert math.isclose(float(found["ce"]), losses(scores(w, x), y).mean(), rel_tol=1e-12)
        assert math.isclose(float(found["align"]), LAM * (pull**2).sum() / (8 * 5), rel_tol=1e-12)
        w = plus(w, -LR, backward(w, x, slope(scores(w, x), y), LAM * 2 / (8 * 5) * pull))
        close(values(module.state_dict()), w)


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


def test_class_means_are_those_of_the_trained_body() -> None:
    """Eq. 3; their global means are those of pFedPM's server."""
    executor = fedproto().inline()
    trained = executor.run(TrainTask(1), executor.send(range(4)))
    executor.fuse(trained)
    for up in executor.uplinks(trained.uplinks[0]):
        x, y = examples(executor, up.client)
        z = features(values(states(executor)[up.client]), x / 255.0)
        for j in set(y):
            np.testing.assert_allclose(up.prototypes.means[j].numpy(), z[y == j].mean(0), rtol=2e-5, atol=1e-6)


# Must hold --------------------------------------------------------------------------------------------------------


def test_evaluated_with_the_newest_means() -> None:
    """Received: the trained body with what the server has fused since; trained: with what it trained with."""
    w = fedproto()
    executor = run_cohorts(w, (ALL, ALL))
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
    assert not torch.equal(states(executor)[1]["means"], newest.prototypes.means)
    assert executor.evaluate(EvalRequest("global", "received", ALL, ("test",))) == []


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
