"""FedAS: the received body is aligned with the own features; bodies are weighted by Fisher traces."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SIZES, Arrays, close, examples, features, gradient, mean, sgd, started, values
from support import BATCH_NORM, World, rounds, same, states, uplinks_of, world

from lightning_modules.methods.fedas import FedAS
from lightning_modules.methods.fedper import FedPer
from lightning_modules.training import Training
from pflsim.data.federated import Shard
from pflsim.engine.execution import TrainTask
from pflsim.messages import Uplink
from pflsim.seeding import seeded_global
from pflsim.servers.fedas import FedAS as Server
from pflsim.servers.fedavg import FedAvg as FedAvgServer

ALL: tuple[int, ...] = (0, 1, 2, 3)
LR, ALIGN_LR = 0.3, 0.5
TRAINING = Training(lr=LR, batch_size=4)


def fedas(model: Any = None, sizes: tuple[int, ...] = SIZES, **settings: Any) -> World:
    return world(partial(FedAS, **settings), Server(), training=TRAINING, model=model, sizes=sizes)


def aligned(received: Arrays, own: Arrays, x: np.ndarray, y: np.ndarray, order: np.ndarray) -> Arrays:
    """One epoch of the alignment of the received body, class by class."""
    means = {j: features(own, x[y == j]).mean(0) for j in set(y)}
    w1, b1 = received[:2]
    for start in range(0, len(order), 4):
        rows = order[start : start + 4]
        z = features([w1, b1], x[rows])
        back = np.zeros_like(z)
        for j in set(y[rows]):
            inside = y[rows] == j
            back[inside] = 2 * (z[inside] - means[j]) / (inside.sum() * z.shape[1])
        back *= z > 0
        w1, b1 = w1 - ALIGN_LR * back.T @ x[rows], b1 - ALIGN_LR * back.sum(0)
    return [w1, b1, *own[2:]]


def trace(w: Arrays, x: np.ndarray, y: np.ndarray) -> float:
    """Σ ‖∇F‖² over mini-batches of every k-th example."""
    count = math.ceil(len(y) / 4)
    return sum((g**2).sum() for first in range(count) for g in gradient(w, x[first::count], y[first::count]))


def test_three_rounds_by_hand() -> None:
    """Alignment, training, traces and the weighted mean; client 3 is absent in round 1."""
    with started(fedas(align_lr=ALIGN_LR)) as executor:
        common = values(states(executor)[0])
        own, begun = [common] * 4, set[int]()
        for t, cohort in ((1, (0, 1, 2)), (2, ALL), (3, ALL)):
            trained = executor.run(TrainTask(t), executor.send(cohort))
            sent = uplinks_of(executor, trained)
            executor.fuse(trained)
            traces = []
            for client in cohort:
                data, w = examples(executor, client), [*common[:2], *own[client][2:]]
                with seeded_global(0, "train", client, t):
                    order = torch.randperm(SIZES[client]).numpy()
                if client in begun:
                    w = aligned(common, own[client], *data, order)
                begun.add(client)
                own[client] = w = sgd(executor, client, t, w, LR)
                traces.append(trace(w, *data))
                close(values(states(executor)[client]), w)
                assert sent[client].numbers == {"fisher_trace": pytest.approx(traces[-1], rel=1e-9)}
            common = mean([own[c] for c in cohort], traces)
            body = [executor.server.state.weights[f"net.body.fc1.{k}"].numpy() for k in ("weight", "bias")]
            close(body, common[:2])


class EqualTraces(FedAS):
    def fisher_trace(self, shard: Shard) -> float:
        return 1.0


def nets(w: World) -> dict[int, dict[str, torch.Tensor]]:
    executor = w.inline()
    rounds(executor, 3, 4, fraction=0.75)
    return {c: {k: v for k, v in s.items() if k.startswith("net.")} for c, s in states(executor).items()}


@pytest.mark.parametrize("model", [None, BATCH_NORM])
def test_without_alignment_and_with_equal_traces_it_is_fedper(model: Any) -> None:
    """To the bit, with clients of equal size; without one of the two it is not."""
    equal = {"sizes": (8, 8, 8, 8), "model": model}
    fedper = nets(world(FedPer, FedAvgServer(), training=TRAINING, **equal))
    w = fedas(align_epochs=0, **equal)
    assert same(nets(replace(w, factory=replace(w.factory, client=partial(EqualTraces, align_epochs=0)))), fedper)
    assert not same(nets(w), fedper)
    assert not same(nets(replace(w, factory=replace(w.factory, client=EqualTraces))), fedper)


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
        expected = np.mean([own[key].numpy() for own in sent], axis=0)
        np.testing.assert_allclose(w.rule.downlink(fused, 0).weights[key].numpy(), expected, rtol=1e-12)
    assert w.rule.fuse(state, []) is state


def test_a_client_that_diverged_does_not_count() -> None:
    w = fedas()
    state = w.rule.init(w.federation)
    good = {k: torch.ones_like(v) for k, v in state.weights.items()}
    bad = {k: torch.full_like(v, math.nan) for k, v in good.items()}
    sent = enumerate([(good, 2.0), (bad, math.nan)])
    ups = [Uplink(own, numbers={"fisher_trace": trace}, client=i) for i, (own, trace) in sent]
    assert all(torch.equal(value, good[k]) for k, value in w.rule.fuse(state, ups).weights.items())


def test_own_features_are_taken_in_evaluation_mode() -> None:
    """Whatever mode the module was left in."""
    w, ends = fedas(BATCH_NORM, align_lr=0.1), []
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
