"""FedPer: where base ends, what travels, and what it is at both ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from support import World, states, world

from lightning_modules.methods.fedper import FedPer
from lightning_modules.nets.mlp import Mlp
from pflsim.engine.execution import TrainTask
from pflsim.params import BODY
from pflsim.servers.fedavg import FedAvg as Server

ALL = (0, 1, 2, 3)
BASE = {"net.body.fc1.weight", "net.body.fc1.bias"}


def fedper(base: Any = "body", **settings: Any) -> World:
    return world(partial(FedPer, base=base), Server(), **settings)


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
