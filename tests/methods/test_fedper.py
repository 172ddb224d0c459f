"""FedPer: where base ends, what travels, and what it is at both ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import World, dropout_mlp, rounds, same, states, world
from torch import nn

from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.fedper import FedPer
from lightning_modules.methods.local import Local
from lightning_modules.nets.mlp import Mlp
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.errors import SettingsError
from pflsim.params import BODY
from pflsim.servers.fedavg import FedAvg as Server
from pflsim.servers.local import Local as LocalServer

ALL = (0, 1, 2, 3)
BASE = {"net.body.fc1.weight", "net.body.fc1.bias"}


def fedper(base: Any = "body", **settings: Any) -> World:
    return world(partial(FedPer, base=base), Server(), **settings)


def after(w: World) -> dict[int, dict[str, torch.Tensor]]:
    executor = w.inline()
    rounds(executor, 3, 4, fraction=0.75)
    return states(executor)


@pytest.mark.parametrize("whole", [1.0, 2])
def test_with_every_layer_shared_it_is_fedavg(whole: Any) -> None:
    assert same(after(fedper(whole)), after(world(FedAvg, Server())))
    assert not same(after(fedper()), after(world(FedAvg, Server())))


def normed(input_shape: tuple[int, ...], classes: int) -> Net:
    body = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    return Net(body, nn.Linear(4, classes), (4,), classes)


def test_with_every_layer_shared_it_is_fedavg_with_batch_norm() -> None:
    """Running statistics go with their layer."""
    settings: dict[str, Any] = {"model": normed, "training": Training(lr=0.1, batch_size=5)}
    assert same(after(fedper(1.0, **settings)), after(world(FedAvg, Server(), **settings)))
    module = fedper(2, **settings).factory.build()
    kept = {f"net.body.2.{k}" for k in ("weight", "bias", "running_mean", "running_var")}
    assert set(module.shared_tensors()) == kept | {"net.body.1.weight", "net.body.1.bias"}


def test_with_no_layer_shared_it_is_local() -> None:
    """And there is no global model to report."""
    executor = fedper(0, model=dropout_mlp).inline()
    rounds(executor, 3, 4, fraction=0.75)
    assert same(states(executor), after(world(Local, LocalServer(), model=dropout_mlp)))
    assert executor.evaluate(EvalRequest("global", "received", ALL, ("test",), 3)) == []
    assert set(executor.send(ALL).down_bytes.values()) == {0}


def test_heads_never_travel() -> None:
    w = fedper()
    executor = w.inline()
    for t in (1, 2):
        sent = executor.send(ALL)
        trained = executor.run(TrainTask(t), sent)
        executor.fuse(trained)
        messages = [executor.downlink(h) for h in sent.downlinks.values()]
        messages += [up for h in trained.uplinks for up in executor.uplinks(h)]
        assert all(set(m.weights) == BASE and not m.extra and not m.numbers for m in messages)
        assert {r.up_bytes for r in trained.reports} == set(sent.down_bytes.values()) == {(16 * 5 + 5) * 4}
    heads = [s["net.head.weight"] for s in states(executor).values()]
    assert all(not torch.equal(heads[0], other) for other in heads[1:])


def test_a_round_by_hand() -> None:
    """All layers train; the bodies' sample-weighted mean (NumPy float64) meets the client's own head."""
    executor = fedper().inline()
    before = states(executor)
    executor.fuse(executor.run(TrainTask(1), executor.send(ALL)))
    trained = states(executor)
    assert all(not torch.equal(before[c][k], trained[c][k]) for c in ALL for k in before[c])
    share = np.array([12, 7, 20, 9]) / 48
    for key in BASE:
        mean = np.einsum("k,k...->...", share, np.stack([trained[c][key].double().numpy() for c in ALL]))
        np.testing.assert_allclose(executor.server.state.weights[key].numpy(), mean, rtol=1e-6, atol=1e-7)
    module = executor.host.factory.build()
    module.load_state_dict(trained[1])
    module.receive(executor.downlink(executor.send((1,)).downlinks[1]))
    assert torch.equal(module.state_dict()["net.head.weight"], trained[1]["net.head.weight"])
    assert torch.equal(module.state_dict()["net.body.fc1.weight"], executor.server.state.weights["net.body.fc1.weight"])


def test_layers_are_counted_from_the_input() -> None:
    model = partial(Mlp, hidden=[5, 4])
    build = partial(fedper, model=model)
    one = build(1).factory.build()
    assert set(one.shared_parameters()) == BASE
    assert set(build(0.34).factory.build().shared_parameters()) == BASE
    assert (
        build("body").factory.build().shared_parameters()
        == BODY.parameters(one)
        == build(2).factory.build().shared_parameters()
    )


@pytest.mark.parametrize("base", [3, -1, 1.5, "tail"])
def test_layers_that_are_not_there_are_refused(base: Any) -> None:
    with pytest.raises(SettingsError, match=r"method\.base"):
        fedper(base)
