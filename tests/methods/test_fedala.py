"""FedALA: the start of a round is mixed element-wise from the own and the received model, with learnt weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import (
    NAMES,
    SIZES,
    Arrays,
    close,
    evaluates,
    examples,
    gradient,
    losses,
    mean,
    plus,
    scores,
    sgd,
    started,
    values,
)
from support import World, normed, rounds, states, world

from lightning_modules.methods.fedala import MAX_PASSES, WINDOW, FedALA
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.seeding import seeded_global
from pflsim.servers.fedavg import FedAvg as Server

ALL: tuple[int, ...] = (0, 1, 2, 3)
LR, ETA, SHARE = 0.3, 2.0, 0.6


def fedala(model: Any = None, **settings: Any) -> World:
    return world(partial(FedALA, **settings), Server(), training=Training(lr=LR, batch_size=4), model=model)


def mixture(own: Arrays, received: Arrays, weights: Arrays) -> Arrays:
    """The first layers as received, the last tensors mixed."""
    first = 4 - len(weights)
    mixed = [a + (b - a) * w for a, b, w in zip(own[first:], received[first:], weights, strict=True)]
    return [*received[:first], *mixed]


def learnt(
    own: Arrays, received: Arrays, weights: Arrays, x: np.ndarray, y: np.ndarray, first: bool
) -> tuple[Arrays, int]:
    """The weights after a round's learning, and its number of passes."""
    found: list[float] = []
    while not found or (first and not (len(found) > 10 and np.std(found[-10:]) < 0.1)):
        total = 0.0
        for start in range(0, len(y), 4):
            part = x[start : start + 4], y[start : start + 4]
            mixed = mixture(own, received, weights)
            total += losses(scores(mixed, part[0]), part[1]).sum() / len(y)
            slopes, gaps = gradient(mixed, *part), plus(received, -1, own)
            steps = zip(weights, slopes[-len(weights) :], gaps[-len(weights) :], strict=True)
            weights = [np.clip(w - ETA * g * gap, 0, 1) for w, g, gap in steps]
        found.append(total)
    return weights, len(found)


@pytest.mark.parametrize("p", [1, 2])
def test_three_rounds_by_hand(p: int) -> None:
    """Starts, W, local training and the mean; and the model that the next round starts. Client 3 begins in round 2."""
    with started(fedala(eta=ETA, share=SHARE, p=p)) as executor:
        initial = common = values(executor.server.state.weights)
        own, weights = [common] * 4, [[np.ones_like(v) for v in common[-2 * p :]]] * 4
        learning = set[int]()

        def start(client: int, t: int, stream: str) -> tuple[Arrays, Arrays]:
            if own[client] is initial and common is initial:
                return common, weights[client]
            with seeded_global(0, stream, client, t):
                rows = torch.randperm(SIZES[client]).numpy()[: math.ceil(SHARE * SIZES[client])]
            x, y = examples(executor, client)
            found, passes = learnt(own[client], common, weights[client], x[rows], y[rows], client not in learning)
            assert passes >= 11 if client not in learning else passes == 1
            return mixture(own[client], common, found), found

        for t, cohort in ((1, (0, 1, 2)), (2, ALL), (3, ALL)):
            executor.fuse(executor.run(TrainTask(t), executor.send(cohort)))
            for client in cohort:
                w, weights[client] = start(client, t, "train")
                learning |= {client} if t > 1 else set()
                own[client] = w = sgd(executor, client, t, w, LR)
                state = states(executor)[client]
                close(values(state), w, 1e-8)
                kept = [state[f"weights.net/{name.replace('.', '/')}"].numpy() for name in NAMES[-2 * p :]]
                close(kept, weights[client], 1e-8)
            common = mean([own[c] for c in cohort], [SIZES[c] for c in cohort])
        assert any(((v > 0.01) & (v < 0.99)).any() for each in weights for v in each)
        evaluates(executor, 4, lambda c, x: scores(start(c, 4, "evaluate")[0], x), "personal received")


@pytest.mark.parametrize(("threshold", "passes"), [(100.0, WINDOW + 1), (1e-300, MAX_PASSES)])
def test_the_first_learning_lasts_until_the_losses_are_alike(threshold: float, passes: int) -> None:
    """At most `MAX_PASSES`; each later one is a single pass. Running statistics stay as received."""
    w = fedala(model=normed, threshold=threshold, share=1.0)
    executor = w.inline()
    rounds(executor, 1, 4)
    module, own, seen = w.factory.build(), executor.host.shards[0], []
    real = module._step  # type: ignore[operator]
    module._step = lambda *a: seen.append(1) or real(*a)  # type: ignore[assignment]
    module.load_state_dict(dict(states(executor)[0]))
    down = executor.downlink(executor.send([0]).downlinks[0])
    for expected in (passes * 3, 3):  # 12 examples make 3 mini-batches
        module.receive(down)
        module.before_training(own)
        assert len(seen) == expected
        seen.clear()
        with torch.no_grad():
            module.net.head.weight.add_(0.1)  # type: ignore[operator]
    statistics = [k for k in down.weights if "running" in k]
    assert statistics and all(torch.equal(module.state_dict()[k], down.weights[k]) for k in statistics)
