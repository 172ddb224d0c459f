"""FedProx, FedAMP and pFedCFR by NumPy: steps, penalties and fusions."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import close, examples, gradient, plus, started, uplinks, values
from support import World, dataset, play, rounds, states, trained_states, world

from lightning_modules.methods.fedamp import FedAMP
from lightning_modules.methods.fedprox import FedProx
from lightning_modules.methods.pfedcfr import PFedCFR
from lightning_modules.nets.cnn import Cnn
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.errors import SettingsError
from pflsim.messages import Message
from pflsim.params import load
from pflsim.servers.fedamp import FedAMP as FedAMPServer
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.pfedcfr import PFedCFR as PFedCFRServer
from pflsim.servers.pfedcfr import PFedCFR as Server

TRAINING = Training(lr=0.1, batch_size=4)


def pfedcfr(r: Any, unit: str = "module", mu: float = 0.001, **server: Any) -> World:
    rule = PFedCFRServer(r=r, unit=unit, **{"alpha": 100.0, "sigma": 1e3, **server})  # type: ignore[arg-type]
    return world(partial(PFedCFR, alpha=100.0, r=r, unit=unit, mu=mu), rule, training=TRAINING)


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
        for client, up in play(executor, t, cohort)[1].items():
            last[client] = {key: value.numpy().astype(np.float64) for key, value in up.weights.items()}
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


LR, LAM, ALPHA, SIGMA, MU = 0.3, 20.0, 4.0, 60.0, 0.7
KEYS = ["net.body.fc1.weight", "net.body.fc1.bias", "net.head.weight", "net.head.bias"]


@pytest.mark.parametrize("steps", [1, 3])
def test_client_steps(steps: int) -> None:
    """w ← w − η(∇F + λ/α·(w − ŵ)) for l ≤ r and w ← w − η(∇F + μ·(w − w̄)) for l > r (eq. 15)."""
    client = partial(PFedCFR, lam=LAM, mu=MU, alpha=ALPHA, r=1, unit="module")
    w = world(client, Server(), sizes=(8,), training=Training(lr=LR, batch_size=8, local_steps=steps))
    module = w.factory.build().double()
    rng = np.random.default_rng(3)
    received = [rng.normal(0, 0.5, size=module.get_parameter(k).shape) for k in KEYS]
    module.receive(Message(weights={k: torch.from_numpy(v) for k, v in zip(KEYS, received, strict=True)}))
    x, y = rng.uniform(size=(8, 16)), rng.integers(0, 3, size=8)
    batch = torch.from_numpy(x).reshape(8, 1, 4, 4), torch.from_numpy(y)

    step = module.make_step(module.schedule()[0])  # type: ignore[arg-type]
    expected = [v.copy() for v in received]
    for _ in range(steps):
        terms = module.optimise(batch, step)
        pulls = [(v - a, LAM / ALPHA if i < 2 else MU) for i, (v, a) in enumerate(zip(expected, received, strict=True))]
        squares = [c / 2 * (d**2).sum() for d, c in pulls]
        assert math.isclose(float(terms["personal"]), squares[0] + squares[1], rel_tol=1e-12, abs_tol=1e-15)
        assert math.isclose(float(terms["generic"]), squares[2] + squares[3], rel_tol=1e-12, abs_tol=1e-15)
        slopes = zip(expected, gradient(expected, x, y), pulls, strict=True)
        expected = [v - LR * (g + c * d) for v, g, (d, c) in slopes]
    close(values(module.state_dict()), expected)


MIXED = ["net.body.conv1.weight", "net.body.conv1.bias", "net.body.norm1.weight"]
STATISTICS = ["net.body.norm1.running_mean", "net.body.norm1.running_var"]
"""They are fused with norm1.weight, the unit of the first parameter of their layer."""


def batch_norm_world() -> World:
    """The threshold r=3 with unit=tensor cuts through the normalisation layer."""
    model = partial(Cnn, channels=[2], kernel=3, padding=1, hidden=4, norm="batch")
    client = partial(PFedCFR, lam=LAM, mu=MU, alpha=ALPHA, r=3, unit="tensor")
    rule = Server(alpha=ALPHA, sigma=SIGMA, r=3, unit="tensor")
    return world(client, rule, sizes=(5, 9, 14), model=model, data=dataset(shape=(1, 8, 8)))


def test_server_fusion_by_tensor_through_batch_norm() -> None:
    """Running statistics get the ζ of norm1.weight, which is made of the parameter alone; the others get the mean."""
    w = batch_norm_world()
    rng = np.random.default_rng(9)
    sent = [{k: rng.normal(size=v.shape) for k, v in w.federation.initial.items()} for _ in range(3)]
    state = w.rule.fuse(w.rule.init(w.federation), uplinks(dict(enumerate(sent)), (5, 9, 14)))
    others = [key for key in w.federation.initial if key not in MIXED + STATISTICS]
    assert "net.body.norm1.bias" in others and len(others) == 5
    assert set(w.rule.numbers(state)) == {f"zeta/{key}" for key in MIXED}
    for n in range(3):
        down = w.rule.downlink(state, n).weights
        for unit in ([MIXED[0]], [MIXED[1]], [MIXED[2], *STATISTICS]):
            distances = [((sent[n][unit[0]] - sent[m][unit[0]]) ** 2).sum() for m in range(3)]
            zeta = [ALPHA * math.exp(-d / SIGMA) / SIGMA if m != n else 0 for m, d in enumerate(distances)]
            zeta[n] = 1 - sum(zeta)
            np.testing.assert_allclose(w.rule.numbers(state)[f"zeta/{unit[0]}"][n].numpy(), zeta, rtol=1e-12)
            for key in unit:
                mixed = sum(zeta[m] * sent[m][key] for m in range(3))
                np.testing.assert_allclose(down[key].numpy(), mixed, rtol=1e-12, err_msg=key)
        for key in others:
            mean = (sent[0][key] + sent[1][key] + sent[2][key]) / 3
            np.testing.assert_allclose(down[key].numpy(), mean, rtol=1e-12, err_msg=key)


def test_client_penalties_by_tensor_through_batch_norm() -> None:
    """λ/(2α) on the three mixed tensors, μ/2 on the other parameters, none on running statistics."""
    module = batch_norm_world().factory.build().double()
    rng = np.random.default_rng(10)
    keys = [*module.shared_parameters(), *module.shared_buffers()]
    received = {key: rng.normal(size=module.state_dict()[key].shape) for key in keys}
    module.receive(Message(weights={key: torch.from_numpy(value) for key, value in received.items()}))
    change = {key: rng.normal(size=value.shape) for key, value in received.items()}
    load(module, {key: torch.from_numpy(received[key] + change[key]) for key in keys})
    terms = module.eval().objective((torch.zeros(2, 1, 8, 8).double(), torch.tensor([0, 1])))
    squares = {key: (change[key] ** 2).sum() for key in module.shared_parameters()}
    personal = sum(squares[key] for key in MIXED)
    assert float(terms["personal"].detach()) == pytest.approx(LAM / (2 * ALPHA) * personal, rel=1e-12)
    assert float(terms["generic"].detach()) == pytest.approx(MU / 2 * (sum(squares.values()) - personal), rel=1e-12)
