"""kNN-Per: the vote of the nearest training examples by its equation, λ_i by hand, and what it is at its limits."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import (
    SIZES,
    Arrays,
    batches,
    close,
    evaluates,
    examples,
    features,
    gradient,
    mean,
    plus,
    scores,
    started,
    values,
)
from support import ALL, BATCH_NORM, World, dataset, dropout_mlp, play, prepared, refusing, rounds, softmax, world

import pflsim
from lightning_modules.contract.checks import SMALL
from lightning_modules.methods.knn_per import KNNPer
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.data.federated import Examples, Shard
from pflsim.engine.execution import EvalRequest
from pflsim.servers.fedavg import FedAvg as Server

LR = 0.3


def knn_per(model: Any = None, **settings: Any) -> World:
    data, rng = dataset(), np.random.default_rng(1)
    noisy = np.where(rng.random(len(data.y)) < 0.3, rng.integers(3, size=len(data.y)), data.y)
    client = partial(KNNPer, **settings)
    return world(client, Server(), training=Training(lr=LR, batch_size=4), data=replace(data, y=noisy), model=model)


def votes(w: Arrays, x: np.ndarray, y: np.ndarray, queries: np.ndarray, k: int, s: float) -> np.ndarray:
    """p_kNN of the queries, [B, 3], one query after another."""
    stored, found = features(w, x), np.zeros((len(queries), 3))
    for row, z in zip(found, features(w, queries), strict=True):
        squares = ((stored - z) ** 2).sum(1)
        near = np.argsort(squares, kind="stable")[:k]
        e = np.exp((squares[near].min() - squares[near]) / (len(z) * s))
        np.add.at(row, y[near], e / e.sum())
    return found


@pytest.mark.parametrize(("k", "s"), [(3, 0.01), (10, 1.0)])
def test_two_rounds_by_hand(k: int, s: float) -> None:
    """FedAvg's mean model; the share of the vote is the best one on the client's two validation examples."""
    with started(knn_per(neighbours=k, scale=s)) as executor:
        w = values(executor.server.state.weights)
        for t in (1, 2):
            ends = []
            for client in ALL:
                own = w
                for x, y in batches(executor, client, t):
                    own = plus(own, -LR, gradient(own, x, y))
                ends.append(own)
            w = mean(ends, SIZES)
            play(executor, t)
            close(values(executor.server.state.weights), w)
            chosen: dict[int, float] = {}

            def mixed(client: int, x: np.ndarray, lam: float, w: Arrays = w) -> np.ndarray:
                vote = votes(w, *examples(executor, client), x, k, s)
                return np.log(np.maximum(lam * vote + (1 - lam) * softmax(scores(w, x)), 1e-12))

            for client in ALL:
                x, y = examples(executor, client, "val")
                best = []
                for tenths in range(11):
                    found = mixed(client, x, tenths / 10)
                    best.append((-(found.argmax(1) == y).mean(), -found[np.arange(len(y)), y].mean(), tenths / 10))
                chosen[client] = min(best)[2]
            evaluates(executor, t, lambda i, x, c=chosen, f=mixed: f(i, x, c[i]), "personal received")
            evaluates(executor, t, lambda _, x, w=w: scores(w, x), "global received")
    assert len({*chosen.values()}) > 1


class Plane(Net):
    """Features are the inputs, and logits are (0, 1)."""

    def __init__(self, shape: tuple[int, ...], classes: int):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(2, classes), (2,), classes)
        torch.nn.init.zeros_(self.head.weight)
        self.head.bias.data = torch.arange(float(classes))


def stored(x: list[list[float]], y: list[int], **settings: Any) -> KNNPer:
    """A client with these training examples."""
    module = KNNPer(Plane((2,), 2), Training(), **{"lam": 0.4, **settings})
    own = Examples(torch.tensor(x), torch.tensor(y), scale=1.0)
    module.before_evaluation(Shard(0, 2, own, own, own))
    return module.eval()


THREE = ([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], [0, 1, 1])


def test_three_examples_in_a_plane() -> None:
    query = torch.zeros(1, 2)
    found = stored(*THREE, neighbours=2, lam=1.0).predict(query).exp()
    torch.testing.assert_close(found, torch.tensor([[0.622459, 0.377541]]), rtol=0, atol=1e-6)
    found = stored(*THREE, neighbours=2).predict(query)
    torch.testing.assert_close(found, torch.tensor([[-0.890748, -0.528224]]), rtol=0, atol=1e-6)
    assert found.exp().sum().item() == pytest.approx(1)
    far = stored(*THREE, neighbours=2, lam=1.0, scale=1e-9).predict(torch.tensor([[-1e4, 1e4]])).exp()
    torch.testing.assert_close(far, torch.tensor([[0.0, 1.0]]), rtol=0, atol=1e-6)


def test_all_neighbours_at_a_large_scale_vote_with_the_class_shares() -> None:
    found = stored(*THREE, neighbours=7, lam=1.0, scale=1e9).predict(torch.tensor([[5.0, -3.0]])).exp()
    torch.testing.assert_close(found, torch.tensor([[1 / 3, 2 / 3]]), rtol=0, atol=1e-6)


def test_of_equally_distant_examples_the_first_votes() -> None:
    same = [[float(i % 2 == 0), 0.0] for i in range(40)]
    found = stored(same, [1, 1, *[0] * 38], neighbours=1, lam=1.0).predict(torch.tensor([[0.5, 0.0]])).exp()
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.0]]), rtol=0, atol=1e-6)


def test_the_store_has_at_most_its_capacity() -> None:
    x, y = torch.arange(40.0).view(20, 2), torch.arange(20) % 2
    found = stored(x.tolist(), y.tolist(), capacity=6).store.tensors
    rows = (found["features"][:, 0] / 2).long()
    assert len(rows) == 6 and (rows.diff() > 0).all() and rows.tolist() != [*range(6)]
    assert torch.equal(found["features"], x[rows]) and torch.equal(found["labels"], y[rows])


def test_without_the_vote_it_is_the_received_global_model() -> None:
    executor = knn_per(lam=0.0).inline()
    rounds(executor, 3, 4, 0.75)
    kinds = [EvalRequest(model, "received", ALL, ("test",), 3) for model in ("personal", "global")]  # type: ignore[arg-type]
    for own, common in zip(*map(executor.evaluate, kinds), strict=True):
        assert own.correct == common.correct and own.loss == pytest.approx(common.loss, rel=1e-5)


@pytest.mark.parametrize("model", [None, dropout_mlp, BATCH_NORM])
def test_the_nearest_training_example_is_the_example_itself(model: Any) -> None:
    """Their features are those of evaluation mode, whatever the module did before."""
    executor = knn_per(model, lam=1.0, neighbours=1).inline()
    rounds(executor, 2, 4)
    executor.host.module.train()
    rows = executor.evaluate(EvalRequest("personal", "received", ALL, ("train",), 2))
    assert [row.correct for row in rows] == [*SIZES]


def test_without_validation_examples_a_share_is_needed() -> None:
    with refusing("validation examples", "client 0", "method.lam"):
        prepared("method=knn_per", *SMALL, "split.validation=0")
    prepared("method=knn_per", *SMALL, "split.validation=0", "method.lam=0.4")


def test_a_loaded_model_lacks_the_examples(tmp_path: Path) -> None:
    run = pflsim.run(method="knn_per", overrides=[*SMALL, f"run_dir={tmp_path / 'run'}", "progress=none"])
    common = pflsim.load_model(run, 1, "last", "global")
    inputs = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    assert common(inputs).shape == (2, 10)
    with refusing("training examples", "in a run"):
        pflsim.load_model(run, 1, "last")(inputs)
