"""FedALA and FedAS: what a client does with a model that it receives."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import by_hand
import numpy as np
import pytest
import torch
from by_hand import SIZES, Arrays, close, examples, features, gradient, mean, plus, scores, sgd, started, values
from support import ALL, BATCH_NORM, World, after, nets, normed, play, rounds, same, states, world

from lightning_modules.methods.fedala import WINDOW, FedALA
from lightning_modules.methods.fedas import FedAS
from lightning_modules.methods.fedper import FedPer
from lightning_modules.training import Training
from pflsim.data.federated import Shard
from pflsim.messages import Uplink
from pflsim.seeding import seeded_global
from pflsim.servers.fedas import FedAS as FedASServer
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.fedavg import FedAvg as Server

# FedALA

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
            total += by_hand.losses(scores(mixed, part[0]), part[1]).sum() / len(y)
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
            play(executor, t, cohort)
            for client in cohort:
                w, weights[client] = start(client, t, "train")
                learning |= {client} if t > 1 else set()
                own[client] = w = sgd(executor, client, t, w, LR)
                state = states(executor)[client]
                close(values(state), w, 1e-8)
                kept = [state[f"weights.net/{name.replace('.', '/')}"].numpy() for name in by_hand.NAMES[-2 * p :]]
                close(kept, weights[client], 1e-8)
            common = mean([own[c] for c in cohort], [SIZES[c] for c in cohort])
        assert any(((v > 0.01) & (v < 0.99)).any() for each in weights for v in each)
        by_hand.evaluates(executor, 4, lambda c, x: scores(start(c, 4, "evaluate")[0], x), "personal received")


@pytest.mark.parametrize(("threshold", "passes"), [(100.0, WINDOW + 1), (1e-300, 15)])
def test_the_first_learning_lasts_until_the_losses_are_alike(
    threshold: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most `MAX_PASSES`; each later one is a single pass. Running statistics stay as received."""
    monkeypatch.setattr("lightning_modules.methods.fedala.MAX_PASSES", 15)
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


# FedAS

FEDAS_LR, ALIGN_LR = 0.3, 0.5
TRAINING = Training(lr=FEDAS_LR, batch_size=4)


def fedas(model: Any = None, sizes: tuple[int, ...] = SIZES, **settings: Any) -> World:
    return world(partial(FedAS, **settings), FedASServer(), training=TRAINING, model=model, sizes=sizes)


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


def test_three_rounds_of_fedas_by_hand() -> None:
    """Alignment, training, traces and the weighted mean; client 3 is absent in round 1."""
    with started(fedas(align_lr=ALIGN_LR)) as executor:
        common = values(states(executor)[0])
        own, begun = [common] * 4, set[int]()
        for t, cohort in ((1, (0, 1, 2)), (2, ALL), (3, ALL)):
            trained, sent = play(executor, t, cohort)
            traces = []
            for client in cohort:
                data, w = examples(executor, client), [*common[:2], *own[client][2:]]
                with seeded_global(0, "train", client, t):
                    order = torch.randperm(SIZES[client]).numpy()
                if client in begun:
                    w = aligned(common, own[client], *data, order)
                begun.add(client)
                own[client] = w = sgd(executor, client, t, w, FEDAS_LR)
                traces.append(trace(w, *data))
                close(values(states(executor)[client]), w)
                assert sent[client].numbers == {"fisher_trace": pytest.approx(traces[-1], rel=1e-9)}
            common = mean([own[c] for c in cohort], traces)
            close(values(executor.server.state.weights), common[:2])


class EqualTraces(FedAS):
    def fisher_trace(self, shard: Shard) -> float:
        return 1.0


@pytest.mark.parametrize("model", [None, BATCH_NORM])
def test_without_alignment_and_with_equal_traces_it_is_fedper(model: Any) -> None:
    """To the bit, with clients of equal size; without one of the two it is not."""
    equal = {"sizes": (8, 8, 8, 8), "model": model}

    def after_rounds(made: World) -> dict[int, dict[str, torch.Tensor]]:
        return nets(after(made, 3, 0.75))

    fedper = after_rounds(world(FedPer, FedAvgServer(), training=TRAINING, **equal))
    w = fedas(align_epochs=0, **equal)
    cases = {partial(EqualTraces, align_epochs=0): True, w.factory.client: False, EqualTraces: False}
    for client, equals in cases.items():
        assert same(after_rounds(replace(w, factory=replace(w.factory, client=client))), fedper) == equals


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
