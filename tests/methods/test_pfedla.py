"""The "must hold" lines of pFedLA and HeurpFedLA, and what a run of them leaves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import World, rounds, same, states, world

from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.heurpfedla import HeurpFedLA
from lightning_modules.methods.local import Local
from lightning_modules.methods.pfedla import PFedLA
from lightning_modules.nets.cnn import Cnn, LeNet
from lightning_modules.training import Training
from pflsim.engine.execution import TrainTask
from pflsim.fusion.hypernetwork import Linear, tensors
from pflsim.messages import Message, Uplink, payload_bytes
from pflsim.servers.base import Federation
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.local import Local as LocalServer
from pflsim.servers.pfedla import PFedLA as Server
from pflsim.types import ClientInfo, Unit

SIZES = (9, 9, 9, 9)
BODY, HEAD = (16 * 5 + 5) * 4, (5 * 3 + 3) * 4  # bytes of the units of support's net


def la(k: int = 0, client: Any = PFedLA, model: Any = None, training: Training | None = None, **rule: Any) -> World:
    small = {"embedding": 4, "hidden": (6,), **rule}
    return world(client, Server(k=k, **small), sizes=SIZES, model=model, training=training)


def after(w: World, count: int = 3) -> dict[int, dict[str, torch.Tensor]]:
    executor = w.inline()
    rounds(executor, count, w.clients)
    return states(executor)


def after_rounds(w: World, count: int) -> Any:
    """The server's state."""
    executor = w.inline()
    rounds(executor, count, w.clients)
    return executor.server.state


def sent(w: World, state: Any, scale: float = 1.0, seed: int = 0) -> list[Uplink]:
    """Uplinks at some distance from what was sent."""
    generator = torch.Generator().manual_seed(seed)
    downs = w.rule.downlinks(state, range(w.clients))
    full = {i: {**state.table[i], **down.weights} for i, down in downs.items()}
    return [
        Uplink({k: v + scale * torch.randn(v.shape, generator=generator) for k, v in weights.items()}, client=i)
        for i, weights in full.items()
    ]


# Must hold ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normaliser", ["softmax", "relu"])
@pytest.mark.parametrize("unit", ["module", "tensor", "model"])
def test_weights_sum_to_one(normaliser: str, unit: str) -> None:
    w = la(normaliser=normaliser, unit=unit, hn_lr=2.0)
    state = after_rounds(w, 4)
    numbers = w.rule.numbers(state)
    names = {"module": {"net.body.fc1", "net.head"}, "model": {"model"}, "tensor": set(w.federation.initial)}[unit]
    assert {name for name in numbers if name.startswith("alpha/")} == {f"alpha/{name}" for name in names}
    for alpha in (numbers[f"alpha/{name}"] for name in names):
        assert alpha.dtype == torch.float64 and (alpha >= 0).all() and alpha.unique().numel() > 4
        torch.testing.assert_close(alpha.sum(1), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("normaliser", ["softmax", "relu"])
def test_frozen_uniform_weights_are_fedavg_with_equal_weights(normaliser: str) -> None:
    frozen = after(la(start="uniform", hn_lr=0.0, normaliser=normaliser))
    average = after(world(FedAvg, FedAvgServer(), sizes=SIZES))
    for client, state in frozen.items():
        for key, value in state.items():
            torch.testing.assert_close(value, average[client][key], rtol=0, atol=1e-6)
    learned = after(la(start="uniform", hn_lr=1.0, normaliser=normaliser))
    assert not torch.allclose(learned[0]["net.head.weight"], frozen[0]["net.head.weight"], rtol=0, atol=1e-4)


def test_keeping_all_units_is_local() -> None:
    w = la(k=2, client=HeurpFedLA, update_kept=False)
    executor = w.inline()
    downs = executor.send(range(4)).down_bytes
    reports = rounds(executor, 3, 4)
    assert set(downs.values()) == {0} and {r.up_bytes for r in reports} == {BODY + HEAD}
    assert same(states(executor), after(world(Local, LocalServer(), sizes=SIZES)))
    before = tensors(w.rule.init(w.federation).nets)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(executor.server.state.nets), strict=True))


# The round ------------------------------------------------------------------------------------------------------------


def test_a_newcomer_is_sent_the_mean_of_those_who_have_reported() -> None:
    """Before anyone has, the initial model; later without the initial rows of those who never did."""
    w = la(hn_lr=0.5)
    executor = w.inline()
    for key, value in executor.server.downlinks([4], joining=True)[4].weights.items():
        torch.testing.assert_close(value, w.federation.initial[key])
    executor.fuse(executor.run(TrainTask(1), executor.send([2])))
    executor.fuse(executor.run(TrainTask(2), executor.send([0, 2])))
    table, sent = executor.server.state.table, executor.server.downlinks([4], joining=True)[4].weights
    assert set(sent) == set(w.federation.initial)
    for key, value in sent.items():
        expected = (table[0][key].double().numpy() + table[2][key].double().numpy()) / 2
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-6, atol=1e-8)


def test_running_statistics_are_mixed_with_their_unit_but_do_not_steer() -> None:
    model = partial(Cnn, channels=[2], kernel=3, hidden=4, norm="batch")
    w = la(model=model, hn_lr=0.5)
    state = after_rounds(w, 2)
    names = [unit.name for unit in state.units]
    at = names.index(next(n for n in names if state.units[names.index(n)].buffers))
    unit: Unit = state.units[at]
    assert {b.rpartition(".")[2] for b in unit.buffers} == {"running_mean", "running_var"}
    alpha = w.rule.numbers(state)[f"alpha/{unit.name}"]
    downs = w.rule.downlinks(state, range(4))
    for key in unit.keys:
        stack = torch.stack([state.table[j][key] for j in range(4)]).double()
        found = torch.stack([downs[i].weights[key] for i in range(4)])
        torch.testing.assert_close(found, (alpha @ stack).float())
    ups = sent(w, state)
    moved = [replace(u, weights={k: v + 9 * (k in unit.buffers) for k, v in u.weights.items()}) for u in ups]
    one, other = (tensors(w.rule.fuse(state, u).nets) for u in (ups, moved))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# HeurpFedLA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "norm", "kept", "costs"),
    [
        ((1, 28, 28), "none", ["net.head", "net.body.fc1"], [491.08, 488.65, 312.52]),
        ((3, 32, 32), "batch", ["net.body.fc1", "net.body.conv2", "net.head"], [693.98, 418.97, 382.25, 379.82]),
    ],
    ids=["emnist", "cifar10"],
)
def test_costs_of_table_3(image: tuple[int, ...], norm: str, kept: list[str], costs: list[float]) -> None:
    """The paper's costs for k = 0, 1, ... are those of 750 downlinks and 750 uplinks, in MiB, of the LeNet, when these
    are the units that are kept. Section 4.4 names the first of each.
    """
    module = HeurpFedLA(LeNet(image, 10, norm=norm), Training(buffers="local"))  # type: ignore[arg-type]
    layout = module.layout("module")
    clients = tuple(ClientInfo(i, 10) for i in range(3))
    federation = Federation(clients, module.shared_tensors(), {"module": layout})
    for k, cost in enumerate(costs):
        rule = Server(k=k, start="uniform")
        state = rule.init(federation)
        own = torch.tensor([1.0, 0.0, 0.0])  # the order in which client 0 prefers itself
        heads = tuple(
            Linear(head.weight, head.bias + own * (9 - kept.index(unit.name) if unit.name in kept else 0))
            for head, unit in zip(state.nets.heads, layout, strict=True)
        )
        state = replace(state, nets=replace(state.nets, heads=heads))
        up, down = Message(weights=module.shared_tensors()), rule.downlink(state, 0)
        assert 750 * (payload_bytes(up) + payload_bytes(down)) / 2**20 == pytest.approx(cost, abs=0.025)
