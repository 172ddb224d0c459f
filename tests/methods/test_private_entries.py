"""FedCAC and FedSelect, whose private entries are chosen by the training: rounds by hand and special cases."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import NAMES, SIZES, Arrays, batches, close, evaluates, gradient, mean, plus, scores, started, values
from support import ALL, World, after, nets, normed, play, rounds, run_cohorts, same, states, uplinks_of, world
from torch import nn

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedcac import FedCAC
from lightning_modules.methods.fedrep import FedRep
from lightning_modules.methods.fedselect import FedSelect
from lightning_modules.methods.local import Local
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.fusion import ServerOptimizer
from pflsim.servers.fedavg import FedAvg as Mean
from pflsim.servers.fedcac import FedCAC as FedCACServer
from pflsim.servers.fedselect import FedSelect as FedSelectServer
from pflsim.servers.local import Local as Alone

# FedCAC

TRAINING = Training(lr=0.2, batch_size=4)


def fedcac(tau: float = 0.4, beta: int = 3, **given: Any) -> World:
    return world(partial(FedCAC, tau=tau), FedCACServer(beta=beta), **{"training": TRAINING, **given})


def marked(start: Arrays, end: Arrays, tau: float) -> list[np.ndarray]:
    found = []
    for a, b in zip(start, end, strict=True):
        sensitivity = abs((b - a) * b).ravel()
        mask = np.zeros(sensitivity.size, bool)
        mask[sorted(range(mask.size), key=lambda e: (-sensitivity[e], e))[: int(tau * mask.size)]] = True
        found.append(mask.reshape(a.shape))
    return found


def customised(ends: dict[int, Arrays], marks: dict[int, list[np.ndarray]], progress: float) -> dict[int, Arrays]:
    """u_i of every client, by pairs."""
    flat = {i: np.concatenate([m.ravel() for m in own]) for i, own in marks.items()}
    overlap = {(i, j): 1 - (a ^ b).sum() / (a.sum() + b.sum()) for i, a in flat.items() for j, b in flat.items()}
    others = [value for (i, j), value in overlap.items() if i != j]
    threshold = np.mean(others) + progress * (max(others) - np.mean(others))
    found = {}
    for i in ends:
        members = [j for j in ends if j == i or overlap[i, j] >= threshold - 1e-12]
        found[i] = mean([ends[j] for j in members], [1] * len(members))
    return found


def test_rounds_by_hand() -> None:
    """All clients, then three, then all, past β; an absent client keeps what it has marked."""
    tau, beta = 0.4, 3
    with started(fedcac(tau, beta)) as executor:
        g = values(executor.server.state.weights)
        own, marks, u = [g] * 4, [[np.zeros(w.shape, bool) for w in g]] * 4, dict[int, Arrays]()
        for t, cohort in enumerate((ALL, (0, 1, 2), ALL, ALL, (0, 1, 3)), 1):

            def received(i: int, g: Arrays = g, u: dict[int, Arrays] = u) -> Arrays:
                return [np.where(m, a, b) for m, a, b in zip(marks[i], u.get(i, own[i]), g, strict=True)]

            if t > 1:
                evaluates(executor, t, lambda i, x: scores(received(i), x), "personal received")
            starts, ends = {i: received(i) for i in cohort}, dict[int, Arrays]()
            for i in cohort:
                w = starts[i]
                for x, y in batches(executor, i, t):
                    w = plus(w, -0.2, gradient(w, x, y))
                ends[i] = w
            play(executor, t, cohort)
            for i in cohort:
                own[i], marks[i] = ends[i], marked(starts[i], ends[i], tau)
            g = mean([*ends.values()], [SIZES[i] for i in cohort])
            u = customised(ends, {i: marks[i] for i in cohort}, t / beta)
            assert (t > beta) == all(np.array_equal(a, b) for i in cohort for a, b in zip(u[i], ends[i], strict=True))
            for i, state in states(executor).items():
                close(values(state), own[i])
                for name, mask in zip(NAMES, marks[i], strict=True):
                    np.testing.assert_array_equal(state[f"marks.net/{name.replace('.', '/')}"].numpy(), mask)
            close(values(executor.server.state.weights), g)


def test_what_travels() -> None:
    """The merged model to the clients of the last round, g to others; up the model and a bit per entry."""
    executor = run_cohorts(fedcac(0.4), [(0, 1, 2)])
    down, g = executor.server.downlinks(ALL), executor.server.state.weights
    sizes = {key: value.numel() for key, value in g.items()}
    assert down[3].weights is g and not down[3].numbers and down[2].numbers
    for key, value in down[2].weights.items():
        assert 0 < (value != g[key]).sum() <= int(0.4 * sizes[key])
    up = uplinks_of(executor, executor.run(TrainTask(2), executor.send(ALL)))[1]
    assert {key: value.nbytes for key, value in up.extra.items()} == {key: -(-n // 8) for key, n in sizes.items()}
    assert executor.server.rule.join(executor.server.state, 4).weights is g


def test_with_all_marks_the_mean_is_uniform() -> None:
    """The overlaps are equal, so the clients stay together after β; equal sizes make FedAvg's mean uniform too."""
    given = {"sizes": (9, 9, 9), "training": TRAINING}
    one, other = (nets(after(made, 4)) for made in (fedcac(1.0, beta=2, **given), world(FedAvg, Mean(), **given)))
    torch.testing.assert_close(one, other)


# FedSelect

EQUAL = {"sizes": (9, 9, 9), "training": Training(lr=0.2, batch_size=4, local_epochs=2)}
WEIGHTS = (0, 2)
"""Positions of the weights in `NAMES`."""


def fedselect(training: Training | None = None, sizes: tuple[int, ...] = (12, 7, 20, 9), **given: Any) -> World:
    made = {key: given.pop(key) for key in ("model", "data", "init") if key in given}
    return world(partial(FedSelect, **given), FedSelectServer(), training=training, sizes=sizes, **made)


def masks(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.removeprefix("private."): value for key, value in state.items() if key.startswith("private.")}


def largest(change: np.ndarray, left: np.ndarray, count: int) -> np.ndarray:
    """The mask of the entries that are left and have changed most."""
    order = sorted(np.flatnonzero(left), key=lambda e: (-change.ravel()[e], e))[:count]
    found = np.zeros(change.size, bool)
    found[order] = True
    return found.reshape(change.shape)


@pytest.mark.parametrize(("reference", "init"), [("round", "same"), ("last_update", "per_client")])
@pytest.mark.parametrize("more", [{}, {"momentum": 0.5, "weight_decay": 0.1, "clip_grad_norm": 0.3}])
def test_rounds_with_growing_masks_by_hand(more: dict[str, float], reference: str, init: str) -> None:
    """All clients, some, all: two local epochs, growth after every second round, by NumPy."""
    cohorts, p, alpha = ((0, 1, 2, 3), (0, 2), (1, 2), (0, 1, 2, 3), (0, 3)), 0.3, 0.45
    training = Training(lr=0.2, batch_size=4, local_epochs=2, **more)  # type: ignore[arg-type]
    with started(fedselect(training, p=p, alpha=alpha, every=2, reference=reference, init=init)) as executor:
        g = values(executor.server.state.weights)
        own, private = [list(g) for _ in ALL], [[np.zeros(w.shape, bool) for w in g] for _ in ALL]
        last = [list(g) for _ in ALL]
        for t, cohort in enumerate(cohorts, 1):
            ends, used = dict[int, Any](), {i: list(private[i]) for i in cohort}
            for i in cohort:
                w = [np.where(m, a, b) for m, a, b in zip(private[i], own[i], g, strict=True)]
                start = w
                phases = ["shared", "shared"]
                if any(m.any() for m in private[i]):
                    phases = ["personal", "shared"] * 2
                steps = list(batches(executor, i, t, epochs=len(phases)))
                size = len(steps) // len(phases)
                for number, phase in enumerate(phases):
                    epoch = steps[size * number : size * (number + 1)]
                    w = epoch_of(w, epoch, [m if phase == "personal" else ~m for m in private[i]], **more)
                own[i] = ends[i] = w
                if t % 2 == 0:
                    for k in WEIGHTS:
                        change = abs(w[k] - (start if reference == "round" else last[i])[k])
                        m = private[i][k]
                        count = min(round(p * (~m).sum()), int(alpha * m.size) - m.sum())
                        private[i][k] = m | largest(change, ~m, max(count, 0))
                    last[i] = w
            for k, old in enumerate(g):
                total = sum(np.where(used[i][k], 0, ends[i][k]) for i in cohort)
                count = sum(~used[i][k] for i in cohort)
                g[k] = np.where(count > 0, total / np.maximum(count, 1), old)
            play(executor, t, cohort)
            close(values(executor.server.state.weights), g)
        for i, state in states(executor).items():
            close(values(state), own[i])
            for k in WEIGHTS:
                found = masks(state)[f"net/{NAMES[k].replace('.', '/')}"].numpy()
                np.testing.assert_array_equal(found, private[i][k])
                assert found.mean() <= alpha
        assert private[2][0].sum() == int(alpha * 80) and 0 < private[1][0].sum() < int(alpha * 80)


def epoch_of(
    w: list[np.ndarray],
    epoch: Any,
    mask: list[np.ndarray],
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip_grad_norm: float = np.inf,
) -> list[np.ndarray]:
    """SGD on the entries of a mask."""
    speed = [np.zeros_like(v) for v in w]
    for x, y in epoch:
        slopes = [s * m for s, m in zip(gradient(w, x, y), mask, strict=True)]
        norm = np.sqrt(sum((s**2).sum() for s in slopes))
        slopes = [s * min(1.0, clip_grad_norm / (norm + 1e-6)) for s in slopes]
        speed = plus(plus(slopes, weight_decay, w), momentum, speed)
        w = [np.where(m, v - 0.2 * s, v) for m, v, s in zip(mask, w, speed, strict=True)]
    return w


def test_only_shared_entries_and_bits_travel() -> None:
    executor = run_cohorts(fedselect(EQUAL["training"]), [ALL, ALL])  # type: ignore[arg-type]
    trained = executor.run(TrainTask(3), executor.send(ALL))
    for client, up in uplinks_of(executor, trained).items():
        private = masks(states(executor)[client])
        assert {name.replace("/", ".") for name in private} == {*up.extra} == {"net.body.fc1.weight", "net.head.weight"}
        for name, mask in private.items():
            key = name.replace("/", ".")
            assert up.weights[key].numel() == (mask == 0).sum() < mask.numel()
            assert up.extra[key].nbytes == -(-mask.numel() // 8)


def without_biases(shape: tuple[int, ...], classes: int) -> Net:
    body = nn.Sequential(nn.Flatten(), nn.Linear(16, 5, bias=False), nn.ReLU())
    return Net(body, nn.Linear(5, classes, bias=False), (5,), classes)


def with_masks(made: World, chosen: str) -> InlineExecutor:
    """Make the weights with this text in their name private."""
    executor = made.inline()
    for client in range(made.clients):
        state = dict(executor.host.states[client])
        for key in masks(state):
            if chosen in key:
                state[f"private.{key}"] = torch.ones_like(state[f"private.{key}"])
        executor.host.states[client] = state
    return executor


@pytest.mark.parametrize(
    ("chosen", "client", "rule"),
    [("head", partial(FedRep, head_epochs=1), Mean()), ("", Local, Alone())],
    ids=["fedrep", "local"],
)
def test_with_fixed_masks_it_is_another_method(chosen: str, client: Any, rule: Any) -> None:
    """Of the head FedRep, head before body; of everything Local. An epoch, since FedRep does not alternate."""
    training = {"sizes": (9, 9, 9), "training": Training(lr=0.2, batch_size=4), "model": without_biases}
    executor = with_masks(fedselect(p=0.0, **training), chosen)
    rounds(executor, 1, 3)
    expected = world(client, rule, **training).inline()
    rounds(expected, 1, 3)
    assert same(nets(states(executor)), states(expected))
    if chosen == "head":
        rounds(executor, 2, 3)
        rounds(expected, 2, 3)
        assert same(nets(states(executor)), states(expected))


def test_a_server_optimiser_moves_what_is_shared() -> None:
    """Momentum of earlier rounds does not move entries that all clients keep for themselves."""
    made = fedselect(Training(lr=0.2, batch_size=4, local_epochs=2), p=0.5, alpha=1.0)
    made.rule.optimizer, made.rule.parameters = ServerOptimizer("fedavgm"), made.factory.build().shared_parameters()
    with started(made) as executor:
        found = 0
        for t in range(1, 5):
            before, private = executor.server.state.weights, [masks(state) for state in states(executor).values()]
            executor.fuse(executor.run(TrainTask(t), executor.send(ALL)))
            for key, value in executor.server.state.weights.items():
                kept = [own[key.replace(".", "/")] for own in private if key.replace(".", "/") in own]
                alone = torch.stack(kept).bool().all(0) if kept else torch.zeros(value.shape, dtype=torch.bool)
                assert torch.equal(value[alone], before[key][alone]) and bool((value != before[key])[~alone].any())
                found += int(alone.sum())
        assert found > 20


@pytest.mark.parametrize("made", [fedcac, fedselect])
def test_running_statistics_stay_on_the_clients(made: Callable[..., World]) -> None:
    own = made(model=normed, training=Training(lr=0.2, batch_size=5))
    assert not any("running" in key for key in own.federation.initial)
    before = states(own.inline())[0]["net.body.2.running_mean"]
    found = [state["net.body.2.running_mean"] for state in after(own, 2).values()]
    assert all(not torch.equal(value, before) for value in found) and not torch.equal(found[0], found[1])


def test_weights_have_masks_and_biases_are_shared() -> None:
    """The scale of normalisation layers is a weight."""
    found = masks(states(fedselect(model=normed).inline())[0])
    assert {*found} == {"net/body/1/weight", "net/body/2/weight", "net/head/weight"}
