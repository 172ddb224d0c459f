"""The "must hold" lines of Local, FedAvg, FedProx, FedAMP and pFedCFR."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import World, rounds, same, softmax, states, trained_states, world

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.fedamp import FedAMP
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedprox import FedProx
from lightning_modules.methods.local import Local
from lightning_modules.methods.pfedcfr import PFedCFR
from lightning_modules.nets.mlp import Mlp
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.errors import SettingsError
from pflsim.messages import Uplink
from pflsim.seeding import torch_generator
from pflsim.servers.fedamp import FedAMP as FedAMPServer
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.fesem import FeSEM as FeSEMServer
from pflsim.servers.local import Local as LocalServer
from pflsim.servers.pfedcfr import PFedCFR as PFedCFRServer
from pflsim.servers.pfedme import PFedMe as PFedMeServer

TRAINING = Training(lr=0.1, batch_size=4)


def after(w: World, count: int = 3) -> dict[int, dict[str, torch.Tensor]]:
    """All private states after some rounds."""
    executor = w.inline()
    rounds(executor, count, w.clients)
    return states(executor)


def pfedcfr(r: Any, unit: str = "module", mu: float = 0.001, **server: Any) -> World:
    rule = PFedCFRServer(r=r, unit=unit, **{"alpha": 100.0, "sigma": 1e3, **server})  # type: ignore[arg-type]
    return world(partial(PFedCFR, alpha=100.0, r=r, unit=unit, mu=mu), rule, training=TRAINING)


HEAD = ("net.head.weight", "net.head.bias")


def regression(values: Any) -> np.ndarray:
    """Weight and bias of a softmax regression as one matrix [C, 17], float64."""
    return np.column_stack([values[key].double().numpy() for key in HEAD])


def gradient(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of softmax(x·Wᵀ), [C, 17]; x with a column of ones, y one-hot."""
    return (softmax(x @ weights.T) - y).T @ x / len(x)


def examples(executor: InlineExecutor, client: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's training examples as `gradient` takes them."""
    own = executor.host.shards[client].train
    pixels = own.x.numpy().reshape(len(own), -1) / 255.0
    return np.column_stack([pixels, np.ones(len(pixels))]), np.eye(3)[own.y.numpy()]


@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("lr_decay", [1.0, 0.5])
def test_one_local_client_is_ordinary_training(momentum: float, weight_decay: float, lr_decay: float) -> None:
    """By NumPy: v ← m·v + ∇F + d·w and w ← w − η·r^(t−1)·v on every mini-batch, v from 0 in every round t."""
    training = Training(lr=0.1, batch_size=4, momentum=momentum, weight_decay=weight_decay, lr_decay=lr_decay)
    w = world(Local, LocalServer(), sizes=(13,), training=training, model=partial(Mlp, hidden=[]))
    executor = w.inline()
    weights, (x, y) = regression(states(executor)[0]), examples(executor, 0)
    for t in (1, 2, 3):
        velocity = np.zeros_like(weights)
        order = torch.randperm(13, generator=torch_generator(0, "batches", 0, t)).numpy()
        for start in range(0, 13, 4):
            rows = order[start : start + 4]
            velocity = momentum * velocity + gradient(weights, x[rows], y[rows]) + weight_decay * weights
            weights = weights - 0.1 * lr_decay ** (t - 1) * velocity
    rounds(executor, 3, 1)
    np.testing.assert_allclose(regression(states(executor)[0]), weights, rtol=1e-5, atol=1e-6)


def test_local_clients_send_nothing_and_do_not_meet() -> None:
    sizes = (12, 7, 20)
    w = world(Local, LocalServer(), sizes=sizes)
    executor = w.inline()
    sent = executor.send([0, 1, 2])
    trained = executor.run(TrainTask(1), sent)
    assert set(sent.down_bytes.values()) == {0} and {r.up_bytes for r in trained.reports} == {0}
    alone = world(Local, LocalServer(), sizes=sizes[:1])
    assert same({0: after(w)[0]}, after(alone))


def test_fedavg_with_one_client_is_local() -> None:
    assert same(after(world(FedAvg, FedAvgServer(), sizes=(13,))), after(world(Local, LocalServer(), sizes=(13,))))


def test_fedavg_weights_by_examples() -> None:
    w = world(FedAvg, FedAvgServer(), sizes=(5, 15))
    key = "net.head.bias"
    a, b = torch.randn(3), torch.randn(3)
    initial = dict(w.federation.initial)
    ups = [Uplink({**initial, key: v}, client=i, num_examples=n) for i, (v, n) in enumerate([(a, 5), (b, 15)])]
    fused = w.rule.fuse(w.rule.init(w.federation), ups).weights[key]
    torch.testing.assert_close(fused, (5 * a + 15 * b) / 20)


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
    executor = world(client, rule, training=training, model=partial(Mlp, hidden=[])).inline()
    rounds(executor, 1, 4)
    sent = executor.send(range(4))
    stored = {c: regression(state) for c, state in states(executor).items()}
    received = {c: regression(executor.downlink(sent.downlinks[c]).weights) for c in range(4)}
    after = trained_states(executor, executor.run(TrainTask(2), sent))
    for c, start in received.items():
        assert abs(start - stored[c]).max() > 1e-3, "the two differ"
        weights = start
        for _ in range(steps):
            weights = weights - 0.4 * (gradient(weights, *examples(executor, c)) + pull * (weights - start))
        np.testing.assert_allclose(regression(after[c]), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 3])
def test_without_its_penalty_fedamp_follows_plain_sgd_from_the_mixture(steps: int) -> None:
    """Round 2 by NumPy: the mixture of the models of round 1, then SGD without a penalty."""
    training, alpha, sigma = Training(lr=0.4, batch_size=100, local_steps=steps), 3.0, 20.0
    ends = []
    for lam in (0.0, 2.0):
        w = world(
            partial(FedAMP, lam=lam, alpha=alpha),
            FedAMPServer(alpha=alpha, sigma=sigma),
            training=training,
            model=partial(Mlp, hidden=[]),
        )
        executor = w.inline()
        rounds(executor, 1, 4)
        sent = {c: regression(state) for c, state in states(executor).items()}
        ends.append(trained_states(executor, executor.run(TrainTask(2), executor.send(range(4)))))
        if lam:
            continue
        for n in range(4):
            zeta = {m: alpha * np.exp(-((sent[n] - sent[m]) ** 2).sum() / sigma) / sigma for m in range(4) if m != n}
            weights = (1 - sum(zeta.values())) * sent[n] + sum(zeta[m] * sent[m] for m in zeta)
            assert abs(weights - sent[n]).max() > 1e-3, "the mixture differs from the client's own model"
            for _ in range(steps):
                weights = weights - 0.4 * gradient(weights, *examples(executor, n))
            np.testing.assert_allclose(regression(ends[0][n]), weights, rtol=1e-5, atol=1e-6)
    assert same(*ends) == (steps == 1), "in the first step the penalty is zero"


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


def test_returning_clients_are_mixed_with_their_last_upload() -> None:
    """A client that has not reported yet is sent the initial values of the mixed units, later its own mixture."""
    w = pfedcfr(r="body")
    executor = w.inline()
    rounds(executor, 1, w.clients, fraction=0.5)
    reported = set(executor.server.state.table)
    assert len(reported) == 2
    for client in range(4):
        down = w.rule.downlink(executor.server.state, client).weights
        untouched = torch.equal(down["net.body.fc1.weight"], w.federation.initial["net.body.fc1.weight"])
        assert untouched == (client not in reported)
    zeta = executor.server_numbers()["zeta/net.body.fc1"]
    absent = [i for i in range(4) if i not in reported]
    assert torch.equal(zeta[absent][:, absent], torch.eye(2, dtype=torch.float64))


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
