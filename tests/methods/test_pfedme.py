"""pFedMe: its equations against NumPy in float64, and what must hold of it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import Records, plan, rounds, same, softmax, states, trained_states, world

from lightning_modules.methods.pfedme import PFedMe
from lightning_modules.nets.mlp import Mlp
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.engine.simulation import Simulation
from pflsim.errors import SettingsError
from pflsim.messages import Message, Uplink
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.pfedme import PFedMe as Server

LR, LAM, K, PERSONAL = 0.05, 6.0, 4, 0.07
KEYS = ["net.body.fc1.weight", "net.body.fc1.bias", "net.head.weight", "net.head.bias"]
Arrays = list[np.ndarray]


def slope(w: Arrays, x: np.ndarray, y: np.ndarray) -> tuple[float, Arrays]:
    """Mean cross-entropy of a ReLU network with one hidden layer, and its gradient, by hand."""
    w1, b1, w2, b2 = w
    hidden = x @ w1.T + b1
    active = np.maximum(hidden, 0)
    scores = active @ w2.T + b2
    p = softmax(scores)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ w2) * (hidden > 0)
    return float(loss), [back.T @ x, back.sum(0), p.T @ active, p.sum(0)]


def theta_of(module: PFedMe) -> Arrays:
    return [value.detach().numpy().copy() for value in module.personal().values()]


def common_of(module: PFedMe) -> Arrays:
    return [module.get_parameter(k).detach().numpy().copy() for k in KEYS]


def close(found: Arrays, expected: Arrays) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def message(rng: np.random.Generator, like: PFedMe) -> tuple[Arrays, Message]:
    values = [rng.normal(0, 0.5, size=like.get_parameter(k).shape) for k in KEYS]
    return values, Message(weights={k: torch.from_numpy(v) for k, v in zip(KEYS, values, strict=True)})


def test_client_steps() -> None:
    """θ goes on from its last value within a round and starts from the received w in the next; w ← w − ηλ(w − θ).

    The run's decay of the rate, momentum and weight decay act on w alone.
    """
    client = partial(PFedMe, lam=LAM, inner_steps=K, personal_lr=PERSONAL)
    w = world(client, Server(), training=Training(lr=LR, lr_decay=0.5, batch_size=5, momentum=0.6, weight_decay=0.2))
    module, rng = w.factory.build().double(), np.random.default_rng(7)
    assert isinstance(module, PFedMe)
    for module.round_number in (1, 2):
        common, down = message(rng, module)
        module.receive(down)
        theta, speed = [v.copy() for v in common], [np.zeros_like(v) for v in common]
        steps = [module.make_step(phase) for phase in module.stages()[0].phases]
        for _ in range(3):  # mini-batches
            x, y = rng.uniform(size=(5, 16)), rng.integers(0, 3, size=5)
            batch, terms = (torch.from_numpy(x).reshape(5, 1, 4, 4), torch.from_numpy(y)), {}
            for step in steps:
                terms |= module.optimise(batch, step)
            loss, pull = 0.0, 0.0
            for _ in range(K):
                loss, gradient = slope(theta, x, y)
                pull = LAM / 2 * sum(((t - c) ** 2).sum() for t, c in zip(theta, common, strict=True))
                theta = [t - PERSONAL * (g + LAM * (t - c)) for t, g, c in zip(theta, gradient, common, strict=True)]
            pulls = [LAM * (c - t) + 0.2 * c for c, t in zip(common, theta, strict=True)]
            speed = [0.6 * s + p for s, p in zip(speed, pulls, strict=True)]
            eta = LR * 0.5 ** (module.round_number - 1)
            common = [c - eta * s for c, s in zip(common, speed, strict=True)]
            assert math.isclose(float(terms["personal/ce"]), loss, rel_tol=1e-10)
            assert math.isclose(float(terms["personal/prox"]), pull, rel_tol=1e-10)
            close(theta_of(module), theta)
            close(common_of(module), common)


def test_many_inner_steps_find_the_gradient_of_the_moreau_envelope() -> None:
    """λ·(w − θ) is then ∇_w min_θ F(θ) + λ/2·‖θ − w‖², here by central differences."""
    client = partial(PFedMe, lam=LAM, inner_steps=60, personal_lr=0.1)
    module = world(client, Server(), training=Training(lr=LR)).factory.build().double()
    assert isinstance(module, PFedMe)
    rng = np.random.default_rng(2)
    start, down = message(rng, module)
    module.receive(down)
    x, y = rng.uniform(size=(6, 16)), rng.integers(0, 3, size=6)
    batch = torch.from_numpy(x).reshape(6, 1, 4, 4), torch.from_numpy(y)
    *inner, step = (module.make_step(phase) for phase in module.stages()[0].phases)
    for each in inner:
        module.optimise(batch, each)
    module.compute_gradients(batch, step.phase, step.parameters)

    def envelope(w: Arrays) -> float:
        theta, loss = [v.copy() for v in w], 0.0
        for _ in range(60):
            loss, gradient = slope(theta, x, y)
            theta = [t - 0.1 * (g + LAM * (t - v)) for t, g, v in zip(theta, gradient, w, strict=True)]
        return loss + LAM / 2 * sum(((t - v) ** 2).sum() for t, v in zip(theta, w, strict=True))

    for part, at in ((0, (1, 3)), (2, (0, 2)), (3, (1,))):
        ends = []
        for sign in (1, -1):
            moved = [v.copy() for v in start]
            moved[part][at] += sign * 1e-5
            ends.append(envelope(moved))
        gradient = step.parameters[part].grad
        assert gradient is not None
        assert math.isclose(float(gradient[at]), (ends[0] - ends[1]) / 2e-5, rel_tol=1e-5, abs_tol=1e-8)


@pytest.mark.parametrize("beta", [1.0, 0.3, 2.0])
def test_server_step(beta: float) -> None:
    """w ← (1 − β)·w + β·mean, the clients counting equally however many examples they have."""
    w = world(PFedMe, Server(beta=beta))
    state, rng = w.rule.init(w.federation), np.random.default_rng(1)
    sent = [{k: torch.from_numpy(rng.normal(size=v.shape)).float() for k, v in state.weights.items()} for _ in range(3)]
    ups = [
        Uplink(weights, client=i, num_examples=n) for i, (weights, n) in enumerate(zip(sent, (5, 1, 90), strict=True))
    ]
    fused = w.rule.fuse(state, ups).weights
    for key, old in state.weights.items():
        mean = sum(s[key].double().numpy() for s in sent) / 3
        expected = (1 - beta) * old.double().numpy() + beta * mean
        np.testing.assert_allclose(fused[key].numpy(), expected, rtol=1e-6, atol=1e-6)
    assert w.rule.fuse(state, []) is state


def test_server_without_inertia_is_fedavgs_for_equal_clients() -> None:
    """β=1 to the bit."""
    pair = [
        world(PFedMe, rule, sizes=(9, 9, 9), training=Training(lr=0.01, batch_size=4)).inline()
        for rule in (Server(), FedAvgServer())
    ]
    for executor in pair:
        rounds(executor, 3, 3)
    assert same(states(pair[0]), states(pair[1]))


def test_running_variances_stay_positive_beyond_the_mean() -> None:
    """With β=2 parameters go beyond the mean, running statistics do not."""
    w = world(PFedMe, Server(beta=2.0), model=normed)
    executor = w.inline()
    rounds(executor, 3, 4)
    weights = executor.server.state.weights
    (variance,) = [k for k in weights if k.endswith("running_var")]
    ups = [Uplink({**weights, variance: torch.full_like(weights[variance], 0.1 * (i + 1))}, client=i) for i in range(2)]
    fused = w.rule.fuse(executor.server.state, ups).weights
    torch.testing.assert_close(fused[variance], torch.full_like(fused[variance], 0.15))


def normed(shape: tuple[int, ...], classes: int) -> Mlp:
    """A net with batch normalisation."""
    net = Mlp(shape, classes, hidden=[6])
    net.body.append(torch.nn.BatchNorm1d(6))  # type: ignore[operator]
    return net


def test_personal_and_global_figures_are_those_of_theta_and_w() -> None:
    """A public error is to report the initial or the common model for θ: here the losses tell the two apart."""
    w = world(PFedMe, Server(), training=Training(lr=0.01, batch_size=4))
    executor = w.inline()
    rounds(executor, 2, 4)
    before = states(executor)
    reported = {m: executor.evaluate(EvalRequest(m, p, (0, 1, 2, 3), ("test",))) for m, p in EVALUATED}  # type: ignore[arg-type]
    for client in range(4):
        theta = {k.removeprefix("theta.").replace("/", "."): v for k, v in before[client].items() if "theta" in k}
        common = {k.removeprefix("net."): v for k, v in executor.server.state.weights.items()}
        assert not any(torch.equal(theta[k], before[client][f"net.{k}"]) for k in theta)
        x, y = executor.host.shards[client].test.batch(slice(None))
        for name, values in (("personal", theta), ("global", common)):
            net = w.factory.build().net
            net.load_state_dict(values)
            with torch.no_grad():
                expected = torch.nn.functional.cross_entropy(net(x), y, reduction="sum")
            assert reported[name][client].loss == pytest.approx(float(expected), rel=1e-6)
    assert same(before, states(executor)), "evaluation changed θ or w"
    losses = {name: [row.loss for row in rows] for name, rows in reported.items()}
    assert losses["personal"] != losses["global"]


EVALUATED = (("personal", "trained"), ("global", "received"))


def test_a_run_reports_both_models(tmp_path: Any) -> None:
    records = Records()
    Simulation(world(PFedMe, Server()).inline(), plan(4, 1), tmp_path, records).run()
    found = {(row.model, row.phase) for row in records.records[0].evaluations}
    assert found == {("personal", "trained"), ("global", "received")}


def test_running_statistics_belong_to_theta_and_w_alike() -> None:
    """A model with batch normalisation: one set of running statistics, which moves with θ's K passes and travels."""
    executor = world(partial(PFedMe, inner_steps=3), Server(), model=normed).inline()
    trained = executor.run(TrainTask(1), executor.send([0]))
    state = trained_states(executor, trained)[0]
    (counted,) = [int(value) for key, value in state.items() if key.endswith("num_batches_tracked")]
    assert counted == 3 * trained.reports[0].steps
    assert not any("running" in key and key.startswith("theta") for key in state)
    (up,) = executor.uplinks(trained.uplinks[0])
    assert any("running_mean" in key for key in up.weights)


def test_the_largest_stable_penalty_is_named() -> None:
    """θ − w shrinks by |1 − λ·η_p| a step, so 2/λ is the bound; up to it everything is taken."""
    with pytest.raises(SettingsError, match=r"method\.lam=15 .*method\.personal_lr.*above 2.*at most 4$") as said:
        world(partial(PFedMe, lam=15.0, personal_lr=0.5), Server(), training=Training(lr=0.05))
    assert "\n" not in str(said.value)
    world(partial(PFedMe, lam=20.0, personal_lr=0.1), Server(), training=Training(lr=0.05))


def test_a_step_of_the_global_model_does_not_go_beyond_the_personal_one() -> None:
    """w − θ shrinks by 1 − lr·λ a step; by default λ is 15, or 1/lr if that is less."""
    grows = Training(lr=0.05, lr_decay=2.0, last_round=3)
    with pytest.raises(SettingsError, match=r"method\.lam=15:.*lr\*lam = 3 .*at most 1/lr = 5$"):
        world(PFedMe, Server(), training=grows)
    for training, lam in ((Training(lr=0.01), 15.0), (Training(lr=0.1), 10.0)):
        module = world(PFedMe, Server(), training=training).factory.build()
        assert isinstance(module, PFedMe) and module.lam == pytest.approx(lam)
