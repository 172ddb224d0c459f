"""FedDBE: a private vector beside the features, and their running mean near the global one."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import World, dataset, rounds, softmax, states, world

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.feddbe import FedDBE
from lightning_modules.nets.cnn import MapCnn
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, ReplyTask, Sent, TrainTask
from pflsim.messages import Message
from pflsim.seeding import seeded_global, torch_generator
from pflsim.servers.feddbe import FedDBE as Server

ALL = (0, 1, 2, 3)
SIZES = (12, 7, 20, 9)
LR, KAPPA, MU = 0.3, 3.0, 0.4
NAMES = ["net.body.fc1.weight", "net.body.fc1.bias", "net.head.weight", "net.head.bias"]
MAPS = partial(MapCnn, hidden_channels=3, channels=2, kernel=3, padding=1, hidden=4)
Arrays = list[np.ndarray]


def feddbe(training: Training | None = None, model: Any = None, data: Any = None, **settings: Any) -> World:
    training = training or Training(lr=LR, batch_size=4)
    return world(partial(FedDBE, **settings), Server(), training=training, model=model, data=data)


def opened(w: World, clients: tuple[int, ...] = ALL) -> InlineExecutor:
    """A federation after the initial round, in which these clients reply."""
    executor = w.inline()
    executor.fuse(executor.run(ReplyTask(), Sent.nothing(clients)))
    return executor


def arrays(executor: Any, client: int, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
    own = executor.host.shards[client].split(split)
    return own.x.numpy().reshape(len(own), -1) / 255.0, own.y.numpy()


def features(w: Arrays, x: np.ndarray) -> np.ndarray:
    return np.maximum(x @ w[0].T + w[1], 0)


def trained(w: Arrays, x: np.ndarray, y: np.ndarray, order: Any, target: Any = None) -> tuple[Arrays, list[float]]:
    """An epoch of SGD of an MLP with one hidden layer and a vector, in float64; and the terms of the means."""
    w, running, terms = list(w), np.zeros_like(w[4]), []
    for start in range(0, len(order), 4):
        rows = order[start : start + 4]
        z = features(w, x[rows])
        p = softmax((z + w[4]) @ w[2].T + w[3])
        p[np.arange(len(rows)), y[rows]] -= 1
        p /= len(rows)
        back, slope = p @ w[2], [p.T @ (z + w[4]), p.sum(0), (p @ w[2]).sum(0)]
        if target is not None:
            running = (1 - MU) * running + MU * z.mean(0)
            terms.append(KAPPA / (2 * len(running)) * ((running - target) ** 2).sum())
            back = back + KAPPA / len(running) * (running - target) * MU / len(rows)
        else:
            slope[2] = slope[2] * 0
        back = back * (z > 0)
        slope = [back.T @ x[rows], back.sum(0), *slope]
        w = [a - LR * b for a, b in zip(w, slope, strict=True)]
    return w, terms


def test_the_initial_round_and_two_rounds_by_hand() -> None:
    """The global mean, the vectors, the nets, their mean and the reported loss in NumPy float64."""
    w = feddbe(kappa=KAPPA, mean_momentum=MU)
    executor, initial = opened(w), w.factory.build().state_dict()
    common = [initial[k].double().numpy().copy() for k in NAMES]
    shares, means = np.array(SIZES) / sum(SIZES), []
    for client in ALL:
        x, y = arrays(executor, client)
        with seeded_global(0, "open", client, 0):
            order = torch.randperm(SIZES[client]).numpy()
        means.append(features(trained([*common, np.zeros(5)], x, y, order)[0], x).mean(0))
    target = shares @ np.stack(means)
    np.testing.assert_allclose(executor.server.state.extra["mean_features"].numpy(), target, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(states(executor)[c][k], initial[k]) for c in ALL for k in NAMES), "nothing is kept"
    vectors = {c: np.zeros(5) for c in ALL}
    own: dict[int, Arrays] = {}
    for t in (1, 2):
        done = executor.run(TrainTask(t), executor.send(ALL))
        executor.fuse(done)
        for client in ALL:
            order = torch.randperm(SIZES[client], generator=torch_generator(0, "batches", client, t)).numpy()
            own[client], terms = trained([*common, vectors[client]], *arrays(executor, client), order, target)
            vectors[client] = own[client][4]
            for name, value in zip([*NAMES, "vector"], own[client], strict=True):
                np.testing.assert_allclose(states(executor)[client][name].numpy(), value, rtol=1e-4, atol=5e-6)
            assert dict(done.reports[client].losses)["mean"] == pytest.approx(np.mean(terms), rel=1e-4)
        common = [np.einsum("k,k...->...", shares, np.stack([own[c][i] for c in ALL])) for i in range(4)]
        for name, value in zip(NAMES, common, strict=True):
            np.testing.assert_allclose(executor.server.state.weights[name].numpy(), value, rtol=1e-4, atol=5e-6)
    assert all(abs(v).max() > 1e-3 for v in vectors.values())
    for model, phase in (("personal", "trained"), ("global", "received")):
        for row in executor.evaluate(EvalRequest(model, phase, ALL, ("test",), 2)):  # type: ignore[arg-type]
            x, y = arrays(executor, row.client, "test")
            net = own[row.client] if model == "personal" else [*common, np.zeros(5)]
            p = softmax((features(net, x) + net[4]) @ net[2].T + net[3])
            assert row.loss == pytest.approx(-np.log(p[np.arange(len(y)), y]).sum(), rel=1e-4)


# Must hold --------------------------------------------------------------------------------------------------------


def after(executor: InlineExecutor, count: int = 3) -> dict[int, dict[str, torch.Tensor]]:
    rounds(executor, count, 4, fraction=0.75)
    return {c: {k: v for k, v in s.items() if k.startswith("net.")} for c, s in states(executor).items()}


# Details ----------------------------------------------------------------------------------------------------------


def test_without_replies_in_the_initial_round_there_is_no_global_mean() -> None:
    executor = opened(feddbe(), clients=())
    assert not executor.server.state.extra
    reports = rounds(executor, 1, 4)
    assert all(set(r.losses) == {"ce"} for r in reports)


def test_the_global_mean_is_over_the_clients_that_reply() -> None:
    """And stays as it is."""
    alone, both = opened(feddbe(), (0,)), opened(feddbe(), (0, 2))
    first, mean = (e.server.state.extra["mean_features"] for e in (alone, both))
    third = opened(feddbe(), (2,)).server.state.extra["mean_features"]
    torch.testing.assert_close(mean, (12 * first + 20 * third) / 32)
    rounds(both, 2, 4)
    assert torch.equal(both.server.state.extra["mean_features"], mean)


def test_the_initial_round_trains_at_the_first_learning_rate() -> None:
    """Whatever its decay."""
    found = [opened(feddbe(Training(lr=LR, batch_size=4, lr_decay=decay))).server.state.extra for decay in (1.0, 0.5)]
    assert torch.equal(found[0]["mean_features"], found[1]["mean_features"])


def test_the_running_mean_starts_anew_in_each_round() -> None:
    """A penalty of one step is that of the first mini-batch, whatever came before."""
    w = feddbe(kappa=2.0, mean_momentum=0.5, training=Training(lr=1e-9, batch_size=20, local_steps=1))
    executor = opened(w)
    losses = []
    for t in (1, 2):
        done = executor.run(TrainTask(t), executor.send(ALL))
        executor.fuse(done)
        losses.append([dict(r.losses)["mean"] for r in done.reports])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_feature_maps() -> None:
    """The vector has the shape of a feature map."""
    executor = opened(feddbe(model=MAPS, data=dataset(shape=(1, 8, 8)), kappa=1.0))
    rounds(executor, 2, 4)
    assert all(s["vector"].dim() == 3 and s["vector"].abs().max() > 0 for s in states(executor).values())
    assert all(math.isfinite(r.loss) for r in executor.evaluate(EvalRequest("personal", "trained", ALL, ("test",), 2)))


def test_newcomers_get_model_and_mean() -> None:
    w = feddbe()
    executor = opened(w)
    down = w.rule.join(executor.server.state, 9)
    module = w.factory.build()
    module.join(Message(weights={k: v + 1 for k, v in down.weights.items()}, extra=down.extra))
    assert torch.equal(module.means.tensors["target"], down.extra["mean_features"])  # type: ignore[union-attr]
    assert (module.vector == 0).all()  # type: ignore[operator]
