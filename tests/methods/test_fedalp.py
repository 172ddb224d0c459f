"""The "must hold" lines of FedALP, and what it says to wrong settings."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from support import World, prepared, rounds, world

from lightning_modules.base import Batch, ClientModule, Terms
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.hosts.server_host import identity
from lightning_modules.methods.fedalp import FedALP
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.nets.net import Net
from lightning_modules.prepare import PreparedRun
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.errors import ServerError, SettingsError
from pflsim.messages import Uplink
from pflsim.servers.base import ServerRule
from pflsim.servers.fedalp import FedALP as Server
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.types import Tensors

TRAINING = Training(lr=0.1, batch_size=4, local_epochs=2)
WARMUP = 5
"""T_pre of the small federation: half of its ten rounds."""


def wide(kind: type[ClientModule]) -> type[ClientModule]:
    """The method's client in float64."""

    class Wide(kind):  # type: ignore[misc, valid-type]
        def __init__(self, net: Net, training: Training):
            super().__init__(net, training)
            self.double()

        def objective(self, batch: Batch) -> Terms:
            return super().objective((batch[0].double(), batch[1]))

    return Wide


def global_models(kind: type[ClientModule], rule: ServerRule[Any], fraction: float = 1.0) -> list[Tensors]:
    """The server's model after each of the five rounds that follow the warm-up."""
    w = world(wide(kind), rule, training=TRAINING)
    executor = w.inline()
    rounds(executor, WARMUP, w.clients)
    found = []
    for t in range(WARMUP + 1, 11):
        cohort = range(w.clients) if fraction == 1 else [(t + i) % w.clients for i in range(2)]
        executor.fuse(executor.run(TrainTask(t), executor.send(sorted(cohort))))
        found.append(executor.server.rule.global_weights(executor.server.state))
    return found


@cache
def fedavg_models(fraction: float = 1.0) -> list[Tensors]:
    return global_models(FedAvg, FedAvgServer(), fraction)


def distance(a: Tensors, b: Tensors) -> float:
    return max(float((a[k] - b[k]).abs().max()) for k in a)


@pytest.mark.parametrize(
    ("settings", "fraction"),
    [
        ({"groups": 3, "beta": 0}, 1.0),
        ({"groups": 3, "beta": 0, "onto": "group"}, 1.0),
        ({"groups": 3, "beta": 0, "unit": "module", "delta": "norm"}, 1.0),
        ({"groups": 1, "beta": 0.6}, 1.0),
        ({"groups": 1, "beta": 1.0}, 0.5),
    ],
)
def test_beta_0_and_one_group_follow_fedavg(settings: Any, fraction: float) -> None:
    ours = global_models(FedALP, Server(**settings), fraction)
    assert all(distance(a, b) < 1e-12 for a, b in zip(ours, fedavg_models(fraction), strict=True))


def test_otherwise_it_does_not() -> None:
    ours, theirs = global_models(FedALP, Server(groups=3, beta=0.6)), fedavg_models()
    assert distance(ours[0], theirs[0]) < 1e-12, "the groups' models start equal"
    assert all(distance(a, b) > 1e-4 for a, b in zip(ours[1:], theirs[1:], strict=True))
    slower = global_models(FedALP, Server(groups=3, beta=0, gamma="all"))
    assert distance(slower[0], theirs[0]) > 1e-4, "the shares of a group do not sum to one"


@cache
def digits(*overrides: str) -> PreparedRun:
    return prepared("method=fedalp", "data=digits", *overrides)


@pytest.mark.parametrize(
    ("warmup", "planned", "expected"),
    [(0.5, 20, 10), (0.4, 100, 40), (0.5, 2, 1), (0.01, 5, 1), (0.99, 5, 4), (0.5, 3, 2)],
)
def test_length_of_the_warm_up(warmup: float, planned: int, expected: int) -> None:
    rule = Server(warmup=warmup)
    assert [t for t in range(1, planned + 1) if rule.full_participation(t, planned)] == [expected]


def fused(**settings: Any) -> tuple[World, InlineExecutor]:
    """A federation after the warm-up and two more rounds."""
    w = world(FedALP, Server(**settings), training=TRAINING)
    executor = w.inline()
    rounds(executor, WARMUP + 2, w.clients)
    return w, executor


def test_a_group_is_sent_one_message() -> None:
    w, executor = fused(groups=2)
    messages = executor.server.downlinks(range(4))
    groups = executor.server.state.groups.tolist()
    for a in range(4):
        for b in range(4):
            assert (identity(messages[a]) == identity(messages[b])) == (groups[a] == groups[b])
    assert len({identity(m) for m in w.inline().server.downlinks(range(4)).values()}) == 1


def test_running_variances_stay_positive() -> None:
    """A group with hardly any variance, beside one with much: an added-up difference would fall below zero."""
    job = digits(
        *["model=cnn_bn", "model.padding=2", "model.channels=[2,2]", "model.hidden=4", "clients=2", "rounds=6"],
        *["method.groups=2", "method.warmup=0.2", "partition=one_class"],
    )
    state, rule = job.rule.init(job.federation), job.rule
    (key,) = [k for k in state.weights if k.endswith("running_var")][:1]
    for t in range(1, 7):
        sent = [{k: v + 0.1 * (i + 1) for k, v in rule.downlink(state, i).weights.items()} for i in range(2)]
        for i, variance in enumerate((0.01, 50.0 if t < 4 else 0.02)):
            sent[i][key] = torch.full_like(sent[i][key], variance)
        state = rule.fuse(state, [Uplink(w, client=i, num_examples=9) for i, w in enumerate(sent)])
        for i in range(2):
            found = rule.downlink(state, i).weights[key]
            assert 0.01 <= float(found.min()) <= float(found.max()) <= 50


def test_a_single_round_is_refused() -> None:
    with pytest.raises(SettingsError, match="rounds=1.*at least 2"):
        digits("rounds=1")


def test_a_diverged_run_says_so() -> None:
    w = world(partial(FedALP), Server(groups=2), training=Training(lr=1e30, batch_size=4), on_nonfinite="keep")
    executor = w.inline()
    with pytest.raises(ServerError, match="finite.*lower lr"):
        rounds(executor, WARMUP, 4)
