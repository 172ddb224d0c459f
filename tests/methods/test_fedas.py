"""FedAS: the received body learns the client's own features; bodies are weighted by Fisher traces."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import World, rounds, same, softmax, states, world

from lightning_modules.methods.fedas import FedAS
from lightning_modules.methods.fedper import FedPer
from lightning_modules.nets.cnn import Cnn
from lightning_modules.training import Training
from pflsim.data.federated import Shard
from pflsim.engine.execution import TrainTask
from pflsim.messages import Uplink
from pflsim.seeding import seeded_global, torch_generator
from pflsim.servers.fedas import FedAS as Server
from pflsim.servers.fedavg import FedAvg as FedAvgServer

ALL = (0, 1, 2, 3)
SIZES = (12, 7, 20, 9)
BODY = ["net.body.fc1.weight", "net.body.fc1.bias"]
NAMES = [*BODY, "net.head.weight", "net.head.bias"]
LR, ALIGN_LR = 0.3, 0.5
BATCH_NORM = partial(Cnn, channels=[2, 3], kernel=3, padding=1, hidden=6, norm="batch")
Arrays = list[np.ndarray]


def fedas(training: Training | None = None, model: Any = None, rule: Any = None, **settings: Any) -> World:
    training = training or Training(lr=LR, batch_size=4)
    sizes = settings.pop("sizes", SIZES)
    return world(partial(FedAS, **settings), rule or Server(), training=training, model=model, sizes=sizes)


def arrays(examples: Any) -> tuple[np.ndarray, np.ndarray]:
    return examples.x.numpy().reshape(len(examples), -1) / 255.0, examples.y.numpy()


def slopes(w: Arrays, x: np.ndarray, y: np.ndarray) -> Arrays:
    """Gradient of the mean cross-entropy of an MLP with one hidden layer, in float64."""
    hidden = x @ w[0].T + w[1]
    z = np.maximum(hidden, 0)
    p = softmax(z @ w[2].T + w[3])
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ w[2]) * (hidden > 0)
    return [back.T @ x, back.sum(0), p.T @ z, p.sum(0)]


def aligned(received: Arrays, own: Arrays, x: np.ndarray, y: np.ndarray, order: np.ndarray) -> Arrays:
    """One epoch of the alignment of the received body, class by class."""
    features = np.maximum(x @ own[0].T + own[1], 0)
    means = {j: features[y == j].mean(0) for j in set(y)}
    w1, b1 = received[:2]
    for start in range(0, len(order), 4):
        rows = order[start : start + 4]
        hidden = x[rows] @ w1.T + b1
        z, back = np.maximum(hidden, 0), np.zeros_like(hidden)
        for j in set(y[rows]):
            inside = y[rows] == j
            back[inside] = 2 * (z[inside] - means[j]) / (inside.sum() * z.shape[1])
        back *= hidden > 0
        w1, b1 = w1 - ALIGN_LR * back.T @ x[rows], b1 - ALIGN_LR * back.sum(0)
    return [w1, b1, *own[2:]]


def trace(w: Arrays, x: np.ndarray, y: np.ndarray) -> float:
    """Σ ‖∇F‖² over mini-batches of every k-th example."""
    count = math.ceil(len(y) / 4)
    found = [slopes(w, x[first::count], y[first::count]) for first in range(count)]
    return sum((g**2).sum() for gradient in found for g in gradient)


def test_three_rounds_by_hand() -> None:
    """Alignment, training, traces and the weighted mean in NumPy float64; client 3 is absent in round 1."""
    w = fedas(align_lr=ALIGN_LR)
    executor, initial = w.inline(), w.factory.build().state_dict()
    common = [initial[k].double().numpy().copy() for k in NAMES]
    own, started = {c: list(common) for c in ALL}, set[int]()
    for t, cohort in ((1, (0, 1, 2)), (2, ALL), (3, ALL)):
        trained = executor.run(TrainTask(t), executor.send(cohort))
        sent = {up.client: up for handle in trained.uplinks for up in executor.uplinks(handle)}
        executor.fuse(trained)
        traces = {}
        for client in cohort:
            x, y = arrays(executor.host.shards[client].train)
            with seeded_global(0, "train", client, t):
                order = torch.randperm(SIZES[client]).numpy()
            new = [*common[:2], *own[client][2:]]
            if client in started:
                new = aligned(common, own[client], x, y, order)
                assert abs(new[0] - common[0]).max() > 1e-3, "the alignment moves the body"
            started.add(client)
            order = torch.randperm(SIZES[client], generator=torch_generator(0, "batches", client, t)).numpy()
            for first in range(0, SIZES[client], 4):
                rows = order[first : first + 4]
                new = [v - LR * g for v, g in zip(new, slopes(new, x[rows], y[rows]), strict=True)]
            own[client], traces[client] = new, trace(new, x, y)
            for name, value in zip(NAMES, new, strict=True):
                np.testing.assert_allclose(states(executor)[client][name].numpy(), value, rtol=1e-4, atol=5e-6)
            assert sent[client].numbers == {"fisher_trace": pytest.approx(traces[client], rel=1e-4)}
        shares = np.array([traces[c] for c in cohort]) / sum(traces.values())
        assert max(shares) / min(shares) > 1.2
        common = [np.einsum("k,k...->...", shares, np.stack([own[c][i] for c in cohort])) for i in range(2)]
        for name, value in zip(BODY, common, strict=True):
            np.testing.assert_allclose(executor.server.state.weights[name].numpy(), value, rtol=1e-4, atol=5e-6)
        common += own[0][2:]


# Must hold --------------------------------------------------------------------------------------------------------


class EqualTraces(FedAS):
    def fisher_trace(self, shard: Shard) -> float:
        return 1.0


def after(w: World) -> dict[int, dict[str, torch.Tensor]]:
    executor = w.inline()
    rounds(executor, 3, 4, fraction=0.75)
    return {c: {k: v for k, v in s.items() if k.startswith("net.")} for c, s in states(executor).items()}


@pytest.mark.parametrize("model", [None, BATCH_NORM])
def test_without_alignment_and_with_equal_traces_it_is_fedper(model: Any) -> None:
    """To the bit, with clients of equal size; without one of the two it is not."""
    equal, training = {"sizes": (8, 8, 8, 8)}, Training(lr=LR, batch_size=4)
    fedper = after(world(FedPer, FedAvgServer(), training=training, model=model, **equal))
    w = fedas(align_epochs=0, model=model, **equal)
    assert same(after(replace(w, factory=replace(w.factory, client=partial(EqualTraces, align_epochs=0)))), fedper)
    assert not same(after(w), fedper)
    assert not same(after(replace(w, factory=replace(w.factory, client=EqualTraces))), fedper)


@pytest.mark.parametrize("traces", [(0.7,) * 3, (0.0,) * 3, (math.nan, math.inf, 0.0)])
def test_equal_traces_give_the_plain_mean(traces: tuple[float, ...]) -> None:
    """Also where no trace says anything, whatever the numbers of examples."""
    w = fedas(sizes=(4, 9, 20))
    rng = np.random.default_rng(8)
    sent = [{k: torch.from_numpy(rng.normal(size=v.shape)) for k, v in w.federation.initial.items()} for _ in traces]
    ups = [
        Uplink(own, client=i, num_examples=n, numbers={"fisher_trace": t})
        for i, (own, n, t) in enumerate(zip(sent, (4, 9, 20), traces, strict=True))
    ]
    state = w.rule.init(w.federation)
    fused = w.rule.fuse(state, ups)
    for key in state.weights:
        mean = np.mean([own[key].numpy() for own in sent], axis=0)
        np.testing.assert_allclose(w.rule.downlink(fused, 0).weights[key].numpy(), mean, rtol=1e-12)
    assert w.rule.fuse(state, []) is state


# Details ----------------------------------------------------------------------------------------------------------


def test_own_features_are_taken_in_evaluation_mode() -> None:
    """Whatever mode the module was left in."""
    w, ends = world(partial(FedAS, align_lr=0.1), Server(), model=BATCH_NORM), []
    executor = w.inline()
    rounds(executor, 1, 4)
    down = executor.downlink(executor.send([2]).downlinks[2])
    for mode in (True, False):
        module = w.factory.build().train(mode)
        module.load_state_dict(dict(states(executor)[2]))
        with seeded_global(0, "train", 2, 2):
            module.receive(down)
            module.before_training(executor.host.shards[2])
        ends.append({2: {k: v.clone() for k, v in module.state_dict().items()}})
    assert same(*ends)


def test_a_client_that_diverged_does_not_count() -> None:
    rule = Server()
    w = fedas(rule=rule)
    state = rule.init(w.federation)
    good = {k: torch.ones_like(v) for k, v in state.weights.items()}
    bad = {k: torch.full_like(v, math.nan) for k, v in good.items()}
    sent = enumerate([(good, 2.0), (bad, math.nan)])
    ups = [Uplink(own, numbers={"fisher_trace": trace}, client=i) for i, (own, trace) in sent]
    assert all(torch.equal(value, good[k]) for k, value in rule.fuse(state, ups).weights.items())
