"""The "must hold" lines of Local, FedAvg, FedProx, FedAMP and pFedCFR."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import batches, close, examples, gradient, plus, started, values
from support import World, after, rounds, same, states, trained_states, world

from lightning_modules.methods.fedamp import FedAMP
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedprox import FedProx
from lightning_modules.methods.local import Local
from lightning_modules.methods.pfedcfr import PFedCFR
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.errors import SettingsError
from pflsim.messages import Uplink
from pflsim.servers.fedamp import FedAMP as FedAMPServer
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.fesem import FeSEM as FeSEMServer
from pflsim.servers.local import Local as LocalServer
from pflsim.servers.pfedcfr import PFedCFR as PFedCFRServer
from pflsim.servers.pfedme import PFedMe as PFedMeServer

TRAINING = Training(lr=0.1, batch_size=4)


def pfedcfr(r: Any, unit: str = "module", mu: float = 0.001, **server: Any) -> World:
    rule = PFedCFRServer(r=r, unit=unit, **{"alpha": 100.0, "sigma": 1e3, **server})  # type: ignore[arg-type]
    return world(partial(PFedCFR, alpha=100.0, r=r, unit=unit, mu=mu), rule, training=TRAINING)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("lr_decay", [1.0, 0.5])
def test_one_local_client_is_ordinary_training(momentum: float, weight_decay: float, lr_decay: float) -> None:
    """By NumPy: v ← m·v + ∇F + d·w and w ← w − η·r^(t−1)·v on every mini-batch, v from 0 in every round t."""
    training = Training(lr=0.1, batch_size=4, momentum=momentum, weight_decay=weight_decay, lr_decay=lr_decay)
    with started(world(Local, LocalServer(), sizes=(13,), training=training)) as executor:
        weights = values(states(executor)[0])
        for t in (1, 2, 3):
            velocity = [np.zeros_like(v) for v in weights]
            for x, y in batches(executor, 0, t):
                velocity = plus(plus(gradient(weights, x, y), momentum, velocity), weight_decay, weights)
                weights = plus(weights, -0.1 * lr_decay ** (t - 1), velocity)
        rounds(executor, 3, 1)
        close(values(states(executor)[0]), weights)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("client", "rule", "pull"),
    [
        (partial(FedProx, mu=0.7), FedAvgServer(), 0.7),
        (partial(FedAMP, lam=3.0, alpha=2.0), FedAMPServer(alpha=2.0, sigma=10.0), 1.5),
    ],
    ids=["fedprox", "fedamp"],
)
def test_a_round_starts_from_the_downlink(client: Any, rule: Any, pull: float, steps: int) -> None:
    """Round 2 by NumPy: w from what was received, not from the client's stored model; w ← w − η·(∇F + c·(w − u))."""
    training = Training(lr=0.4, batch_size=100, local_steps=steps)
    with started(world(client, rule, training=training)) as executor:
        rounds(executor, 1, 4)
        sent = executor.send(range(4))
        stored = {c: values(state) for c, state in states(executor).items()}
        received = {c: values(executor.downlink(sent.downlinks[c]).weights) for c in range(4)}
        found = trained_states(executor, executor.run(TrainTask(2), sent))
        for c, start in received.items():
            assert abs(start[2] - stored[c][2]).max() > 1e-3, "the two differ"
            weights = start
            for _ in range(steps):
                slopes = gradient(weights, *examples(executor, c))
                weights = plus(weights, -0.4, plus(slopes, pull, plus(weights, -1, start)))
            close(values(found[c]), weights)


def test_pfedcfr_without_mixed_units_is_the_uniform_mean() -> None:
    """r=0: all clients start from the uniform mean and are pulled to it, which is FedProx with equal sample weights."""
    prox = world(partial(FedProx, mu=0.5), FedAvgServer(), sizes=(9, 9, 9), training=TRAINING)
    rule = PFedCFRServer(r=0, alpha=100.0, sigma=1e3)
    cfr = world(partial(PFedCFR, alpha=100.0, r=0, unit="module", mu=0.5), rule, sizes=(9, 9, 9), training=TRAINING)
    assert same(after(cfr), after(prox))


@pytest.mark.parametrize(
    ("rule", "weighted"),
    [
        (FedAvgServer(), True),
        (PFedCFRServer(r=0, alpha=100.0, sigma=1e3), False),
        (PFedMeServer(), False),
        (FeSEMServer(groups=1), False),
    ],
    ids=["fedavg", "pfedcfr", "pfedme", "fesem"],
)
def test_the_mean_of_clients_of_unequal_sizes(rule: Any, weighted: bool) -> None:
    """Σ n_i·w_i / Σ n_i where the paper weights by examples, else Σ w_i / N, by NumPy."""
    sizes = (4, 9, 20)
    w = world(FedAvg, rule, sizes=sizes)
    rng = np.random.default_rng(8)
    sent = [{k: rng.normal(size=v.shape) for k, v in w.federation.initial.items()} for _ in sizes]
    ups = [
        Uplink({k: torch.from_numpy(v).float() for k, v in own.items()}, client=i, num_examples=sizes[i])
        for i, own in enumerate(sent)
    ]
    down = rule.downlink(rule.fuse(rule.init(w.federation), ups), 1).weights
    for key in w.federation.initial:
        mean = np.average([own[key] for own in sent], axis=0, weights=sizes if weighted else None)
        np.testing.assert_allclose(down[key].numpy(), mean, rtol=1e-5, atol=1e-6, err_msg=key)


def test_a_negative_self_weight_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"\(N.*1\).*alpha.*sigma"):
        pfedcfr(r="body", alpha=500.0, sigma=1e3).inline()
    executor = pfedcfr(r="body", alpha=500.0, sigma=1e3, clamp=True).inline()
    rounds(executor, 2, 4)
    zeta = executor.server_numbers()["zeta/net.body.fc1"]
    assert (zeta >= 0).all() and torch.allclose(zeta.sum(1), torch.ones(4, dtype=torch.float64))


def test_absent_clients_count_with_their_last_upload() -> None:
    """Three rounds with partial participation; ζ, mixtures and mean by NumPy from the uploads collected by hand."""
    w = pfedcfr(r=1)
    executor, last = w.inline(), dict[int, Any]()
    mixed, common = ("net.body.fc1.weight", "net.body.fc1.bias"), ("net.head.weight", "net.head.bias")
    for t, cohort in ((1, (0, 2)), (2, (1, 2)), (3, (0, 3))):
        trained = executor.run(TrainTask(t), executor.send(cohort))
        for up in (up for handle in trained.uplinks for up in executor.uplinks(handle)):
            last[up.client] = {key: value.numpy().astype(np.float64) for key, value in up.weights.items()}
        executor.fuse(trained)
        ids = sorted(last)
        for client in {*range(4)} - {*ids}:  # its own mixture of what it had at first
            down = w.rule.downlink(executor.server.state, client).weights
            assert all(torch.equal(down[key], w.federation.initial[key]) for key in mixed)
        flat = {i: np.concatenate([last[i][key].ravel() for key in mixed]) for i in ids}
        for client in ids:
            zeta = {m: 100 / 1e3 * np.exp(-((flat[client] - flat[m]) ** 2).sum() / 1e3) for m in ids if m != client}
            zeta[client] = 1 - sum(zeta.values())
            found = executor.server_numbers()["zeta/net.body.fc1"][client]
            np.testing.assert_allclose([float(found[m]) for m in ids], [zeta[m] for m in ids], rtol=1e-6)
            down = w.rule.downlink(executor.server.state, client).weights
            for key in mixed:
                np.testing.assert_allclose(down[key], sum(zeta[m] * last[m][key] for m in ids), rtol=1e-5, atol=1e-7)
            for key in common:
                mean = sum(last[m][key] for m in ids) / len(ids)
                np.testing.assert_allclose(down[key], mean, rtol=1e-5, atol=1e-7)


def test_nothing_to_mix_is_said() -> None:
    """As one unit the model ends with the classifier, so "body" would be no unit at all."""
    w = pfedcfr(r="body", unit="model")
    with pytest.raises(SettingsError, match=r"method\.r=body with method\.unit=model"):
        w.rule.init(w.federation)
