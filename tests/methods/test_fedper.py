"""FedPer: where base ends, what travels, and what it is at both ends."""

from __future__ import annotations

from functools import partial
from typing import Any

from support import World, world

from lightning_modules.methods.fedper import FedPer
from lightning_modules.nets.mlp import Mlp
from pflsim.params import BODY
from pflsim.servers.fedavg import FedAvg as Server

BASE = {"net.body.fc1.weight", "net.body.fc1.bias"}


def fedper(base: Any = "body", **settings: Any) -> World:
    return world(partial(FedPer, base=base), Server(), **settings)


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
