"""FedBN: normalisation layers are private, the other layers follow FedAvg; reported as received."""

from __future__ import annotations

from typing import Any

import pytest
from support import World, world
from torch import nn

from lightning_modules.methods.fedbn import FedBN
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.servers.fedavg import FedAvg as Server

ALL = (0, 1, 2, 3)


def misnamed(input_shape: tuple[int, ...], classes: int) -> Net:
    """Normalisation layers of two kinds with ordinary names, and a linear layer that is called bn."""
    body = nn.Sequential()
    body.add_module("flatten", nn.Flatten())
    body.add_module("bn", nn.Linear(16, 6))
    body.add_module("scale", nn.BatchNorm1d(6))
    body.add_module("act", nn.ReLU())
    body.add_module("level", nn.LayerNorm(6))
    return Net(body, nn.Linear(6, classes), (6,), classes)


NORMS = {f"net.body.scale.{k}" for k in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
NORMS |= {f"net.body.level.{k}" for k in ("weight", "bias")}
REST = {f"net.{layer}.{k}" for layer in ("body.bn", "head") for k in ("weight", "bias")}


def normed(buffers: Any = "aggregate") -> World:
    training = Training(lr=0.1, batch_size=5, buffers=buffers)
    return world(FedBN, Server(), model=misnamed, training=training)


@pytest.mark.parametrize("buffers", ["aggregate", "local", "recalibrate"])
def test_normalisation_layers_never_travel(buffers: Any) -> None:
    """By their class, not by their name, and under every setting for running statistics."""
    w = normed(buffers)
    executor = w.inline()
    assert set(w.factory.build().state_dict()) == NORMS | REST
    for t in (1, 2):
        sent = executor.send(ALL)
        trained = executor.run(TrainTask(t), sent)
        executor.fuse(trained)
        assert all(set(executor.downlink(h).weights) == REST for h in sent.downlinks.values())
        assert all(set(up.weights) == REST for h in trained.uplinks for up in executor.uplinks(h))
        assert {r.up_bytes for r in trained.reports} == set(sent.down_bytes.values()) == {(16 * 6 + 6 + 6 * 3 + 3) * 4}
