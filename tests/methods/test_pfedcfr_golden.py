"""pFedCFR against an independent NumPy computation in float64."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from by_hand import close, gradient, values
from support import World, dataset, world

from lightning_modules.methods.pfedcfr import PFedCFR
from lightning_modules.nets.cnn import Cnn
from lightning_modules.training import Training
from pflsim.messages import Message, Uplink
from pflsim.params import load
from pflsim.servers.pfedcfr import PFedCFR as Server

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


def test_server_fusion() -> None:
    """ζ_nm = α·e^{−d/σ}/σ with d over weight and bias of the unit, self weight 1 − Σ; beyond r the plain mean."""
    client = partial(PFedCFR, alpha=ALPHA, r=1, unit="module")
    rule = Server(alpha=ALPHA, sigma=SIGMA, r=1)
    w = world(client, rule, sizes=(5, 6, 7))
    rng = np.random.default_rng(5)
    sent = [{k: rng.normal(size=w.federation.initial[k].shape) for k in KEYS} for _ in range(3)]
    uplinks = [
        Uplink({k: torch.from_numpy(v) for k, v in s.items()}, client=i, num_examples=5 + i) for i, s in enumerate(sent)
    ]  # eq. 12 is uniform, whatever the sizes
    state = rule.fuse(rule.init(w.federation), uplinks)

    zeta = np.zeros((3, 3))
    for n in range(3):
        for m in range(3):
            if n != m:
                d = sum(((sent[n][k] - sent[m][k]) ** 2).sum() for k in KEYS[:2])
                zeta[n, m] = ALPHA * math.exp(-d / SIGMA) / SIGMA
        zeta[n, n] = 1 - zeta[n].sum()
    np.testing.assert_allclose(rule.numbers(state)["zeta/net.body.fc1"].numpy(), zeta, rtol=1e-12)
    for n in range(3):
        down = rule.downlink(state, n).weights
        for k in KEYS[:2]:
            np.testing.assert_allclose(down[k].numpy(), sum(zeta[n, m] * sent[m][k] for m in range(3)), rtol=1e-12)
        for k in KEYS[2:]:
            np.testing.assert_allclose(down[k].numpy(), (sent[0][k] + sent[1][k] + sent[2][k]) / 3, rtol=1e-12)


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
    uplinks = [Uplink({k: torch.from_numpy(v) for k, v in s.items()}, client=i) for i, s in enumerate(sent)]
    state = w.rule.fuse(w.rule.init(w.federation), uplinks)
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
