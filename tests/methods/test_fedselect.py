"""FedSelect: what trains when, how masks grow, and the mean of what is shared."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import NAMES, batches, close, gradient, plus, started, values
from support import World, after, normed, rounds, run_cohorts, same, states, uplinks_of, world
from torch import nn

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedrep import FedRep
from lightning_modules.methods.fedselect import FedSelect
from lightning_modules.methods.local import Local
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.config.settings import ServerOptimizer
from pflsim.engine.execution import TrainTask
from pflsim.servers.fedavg import FedAvg as Mean
from pflsim.servers.fedselect import FedSelect as Server
from pflsim.servers.local import Local as Alone

ALL = (0, 1, 2, 3)
EQUAL = {"sizes": (9, 9, 9), "training": Training(lr=0.2, batch_size=4, local_epochs=2)}
WEIGHTS = (0, 2)
"""Positions of the weights in `NAMES`."""


def fedselect(training: Training | None = None, sizes: tuple[int, ...] = (12, 7, 20, 9), **given: Any) -> World:
    made = {key: given.pop(key) for key in ("model", "data") if key in given}
    return world(partial(FedSelect, **given), Server(), training=training, sizes=sizes, **made)


def masks(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.removeprefix("private."): value for key, value in state.items() if key.startswith("private.")}


def largest(change: np.ndarray, left: np.ndarray, count: int) -> np.ndarray:
    """The mask of the entries that are left and have changed most."""
    order = sorted(np.flatnonzero(left), key=lambda e: (-change.ravel()[e], e))[:count]
    found = np.zeros(change.size, bool)
    found[order] = True
    return found.reshape(change.shape)


@pytest.mark.parametrize("reference", ["round", "last_update"])
@pytest.mark.parametrize("more", [{}, {"momentum": 0.5, "weight_decay": 0.1, "clip_grad_norm": 0.3}])
def test_rounds_by_hand(more: dict[str, float], reference: str) -> None:
    """All clients, some, all: two local epochs, growth after every second round, by NumPy."""
    cohorts, p, alpha = ((0, 1, 2, 3), (0, 2), (1, 2), (0, 1, 2, 3), (0, 3)), 0.3, 0.45
    training = Training(lr=0.2, batch_size=4, local_epochs=2, **more)  # type: ignore[arg-type]
    with started(fedselect(training, p=p, alpha=alpha, every=2, reference=reference)) as executor:
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
            executor.fuse(executor.run(TrainTask(t), executor.send(cohort)))
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


def test_without_private_entries_it_is_fedavg() -> None:
    """And the mean is uniform: the sizes are equal."""
    assert same(kept(after(fedselect(alpha=0.0, **EQUAL))), kept(after(world(FedAvg, Mean(), **EQUAL))))
    assert not same(kept(after(fedselect(**EQUAL))), kept(after(world(FedAvg, Mean(), **EQUAL))))


def kept(found: dict[int, dict[str, torch.Tensor]]) -> dict[int, dict[str, torch.Tensor]]:
    """The net of every client."""
    return {c: {k: v for k, v in state.items() if k.startswith("net.")} for c, state in found.items()}


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
    assert same(kept(states(executor)), states(expected))
    if chosen == "head":
        rounds(executor, 2, 3)
        rounds(expected, 2, 3)
        assert same(kept(states(executor)), states(expected))


def test_equal_clients_stay_equal() -> None:
    """Every entry's mean is the clients' own."""
    made = fedselect(training=Training(lr=0.2, batch_size=20), sizes=(12,) * 4)
    executor = replace(made, partition=replace(made.partition, train=made.partition.train[:1] * 4)).inline()
    rounds(executor, 3, 4)
    found = states(executor)
    assert sum(float(m.sum()) for m in masks(found[0]).values()) > 20
    for key, mean in executor.server.state.weights.items():
        mask = masks(found[0]).get(key.replace(".", "/"), torch.zeros(mean.shape))
        for state in found.values():
            assert torch.allclose(state[key][mask == 0], mean[mask == 0], atol=1e-6)


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


def test_running_statistics_stay_on_the_clients() -> None:
    """Biases are shared, and the scale of normalisation layers is a weight."""
    made = fedselect(model=normed, training=Training(lr=0.2, batch_size=5))
    assert not any("running" in key for key in made.federation.initial)
    assert {*masks(states(made.inline())[0])} == {"net/body/1/weight", "net/body/2/weight", "net/head/weight"}
    before = states(made.inline())[0]["net.body.2.running_mean"]
    found = [state["net.body.2.running_mean"] for state in after(made, 2).values()]
    assert all(not torch.equal(value, before) for value in found) and not torch.equal(found[0], found[1])
