"""The "must hold" lines of pFedLA and HeurpFedLA, and what a run of them leaves."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import differences
from support import World, after, play, rounds, same, states, world

from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.heurpfedla import HeurpFedLA
from lightning_modules.methods.local import Local
from lightning_modules.methods.pfedla import PFedLA
from lightning_modules.nets.cnn import Cnn, LeNet
from lightning_modules.training import Training
from pflsim.fusion.hypernetwork import Hypernetworks, Linear, tensors
from pflsim.messages import Message, Uplink, payload_bytes
from pflsim.servers.base import Federation
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.local import Local as LocalServer
from pflsim.servers.pfedla import PFedLA as Server
from pflsim.servers.pfedla import State
from pflsim.types import ClientInfo, Unit

SIZES = (9, 9, 9, 9)
BODY, HEAD = (16 * 5 + 5) * 4, (5 * 3 + 3) * 4  # bytes of the units of support's net


def la(k: int = 0, client: Any = PFedLA, model: Any = None, training: Training | None = None, **rule: Any) -> World:
    small = {"embedding": 4, "hidden": (6,), **rule}
    return world(client, Server(k=k, **small), sizes=SIZES, model=model, training=training)


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
    play(executor, 1, [2])
    play(executor, 2, [0, 2])
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


UNITS = {"net.body.fc1": ["net.body.fc1.weight", "net.body.fc1.bias"], "net.head": ["net.head.weight", "net.head.bias"]}
N, RATE = 4, 0.02
CASES = [(normaliser, k) for normaliser in ("softmax", "relu") for k in (0, 1)]

Net = dict[str, list[np.ndarray]]
"""One client's hypernetwork: `v`, then weight and bias of the `hidden` layers and of the `heads`, in turn."""


def numpy_net(nets: Hypernetworks, client: int) -> Net:
    def rows(layers: tuple[Linear, ...]) -> list[np.ndarray]:
        return [t[client].numpy().copy() for layer in layers for t in (layer.weight, layer.bias)]

    return {"v": [nets.embeddings[client].numpy().copy()], "hidden": rows(nets.hidden), "heads": rows(nets.heads)}


def weights(net: Net, client: int, normaliser: str) -> np.ndarray:
    """α_i [L, N] = HN_i(v_i; ψ_i) (eqs. 3, 4)."""
    (x,) = net["v"]
    for w, b in zip(net["hidden"][::2], net["hidden"][1::2], strict=True):
        x = np.maximum(w @ x + b, 0)
    scores = np.stack([w @ x + b for w, b in zip(net["heads"][::2], net["heads"][1::2], strict=True)])
    if normaliser == "softmax":
        e = np.exp(scores)
        return e / e.sum(1, keepdims=True)
    e = np.maximum(scores, 0)
    alpha = np.zeros_like(e)
    for unit, row in enumerate(e):
        alpha[unit] = row / row.sum() if row.sum() > 0 else np.eye(N)[client]
    return alpha


def mixture(alpha: np.ndarray, table: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """w̄_i^l = Σ_j α_i^{l,j}·θ_j^l (eq. 6)."""
    return {
        key: sum(alpha[unit, j] * table[j][key] for j in range(N))
        for unit, keys in enumerate(UNITS.values())
        for key in keys
    }


def kept(alpha: np.ndarray, client: int, k: int) -> list[int]:
    """AT_k (eq. 12)."""
    return sorted(range(len(UNITS)), key=lambda unit: -alpha[unit, client])[:k]


def setting(normaliser: str, k: int, **more: Any) -> tuple[World, State, list[dict[str, np.ndarray]]]:
    """A server in the middle of a run: everything random, everything float64."""
    rule = Server(k=k, embedding=3, hidden=(4, 3), normaliser=normaliser, hn_lr=RATE, **more)  # type: ignore[arg-type]
    w = world(PFedLA, rule, sizes=(5, 6, 7, 8))
    rng = np.random.default_rng(8)
    table = [{key: rng.normal(size=v.shape) for key, v in w.federation.initial.items()} for _ in range(N)]
    state = rule.init(w.federation)
    nets = Hypernetworks(state.nets.embeddings.double(), spread(state.nets.hidden, rng), spread(state.nets.heads, rng))
    return w, replace(state, table={j: torched(t) for j, t in enumerate(table)}, nets=nets), table


def spread(layers: tuple[Linear, ...], rng: np.random.Generator) -> tuple[Linear, ...]:
    """Layers whose outputs differ enough for relu to cut some off."""
    return tuple(Linear(*(torch.from_numpy(rng.normal(size=t.shape)) for t in (x.weight, x.bias))) for x in layers)


def torched(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(v) for key, v in arrays.items()}


@pytest.mark.parametrize(("normaliser", "k"), CASES)
def test_downlinks(normaliser: str, k: int) -> None:
    w, state, table = setting(normaliser, k)
    numbers = w.rule.numbers(state)
    for client, message in w.rule.downlinks(state, [3, 0, 2]).items():
        alpha = weights(numpy_net(state.nets, client), client, normaliser)
        np.testing.assert_allclose(alpha.sum(1), 1, rtol=1e-14)
        for unit, name in enumerate(UNITS):
            np.testing.assert_allclose(numbers[f"alpha/{name}"][client].numpy(), alpha[unit], rtol=1e-12)
        retained = [list(UNITS)[unit] for unit in kept(alpha, client, k)]
        expected = {
            key: v
            for key, v in mixture(alpha, table).items()
            if key.removesuffix(key[key.rindex(".") :]) not in retained
        }
        assert message.weights.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(message.weights[key].numpy(), value, rtol=1e-11, atol=1e-13)
        assert ("kept" in numbers) == (k > 0)
        if k:
            assert numbers["kept"][client].nonzero().flatten().tolist() == sorted(kept(alpha, client, k))


@pytest.mark.parametrize("update_kept", [True, False])
@pytest.mark.parametrize(("normaliser", "k"), CASES)
def test_step_is_the_vector_jacobian_product(normaliser: str, k: int, update_kept: bool) -> None:
    """v_i + η·(∇_{v_i} w̄_i)ᵀ Δ_i and ψ_i likewise (eqs. 10, 11), the Jacobian by central differences, over the table
    that w̄_i was made of; Δ_i of a kept unit is relative to the client's last upload. Clients that did not take part
    stay as they are.
    """
    w, state, table = setting(normaliser, k, update_kept=update_kept)
    rng = np.random.default_rng(9)
    after = {i: {key: rng.normal(size=v.shape) for key, v in table[0].items()} for i in (0, 2, 3)}
    fused = w.rule.fuse(state, [Uplink(torched(sent), client=i) for i, sent in after.items()])
    largest = 0.0
    for client, sent in after.items():
        net, found = numpy_net(state.nets, client), numpy_net(fused.nets, client)
        alpha = weights(net, client, normaliser)
        retained = [key for unit in kept(alpha, client, k) for key in list(UNITS.values())[unit]]
        start = {key: table[client][key] if key in retained else v for key, v in mixture(alpha, table).items()}
        delta = {key: sent[key] - value for key, value in start.items()}
        moving = [unit for unit in range(len(UNITS)) if update_kept or unit not in kept(alpha, client, k)]
        keys = [key for unit in moving for key in list(UNITS.values())[unit]]

        def along(net: Net, client: int = client, keys: list[str] = keys, delta: Any = delta) -> float:
            """⟨w̄_i, Δ_i⟩ over the units that count."""
            mixed = mixture(weights(net, client, normaliser), table)
            return sum(float((mixed[key] * delta[key]).sum()) for key in keys)

        for part, arrays in net.items():
            for number, array in enumerate(arrays):
                change = RATE * differences(lambda net=net, along=along: along(net), array)
                largest = max(largest, abs(change).max())
                np.testing.assert_allclose(found[part][number], array + change, rtol=1e-6, atol=1e-8)
    assert largest > 0.01
    assert all(np.array_equal(a, b) for a, b in zip(*map(flat, (state.nets, fused.nets)), strict=True))
    for i in range(N):
        expected = after.get(i, table[i])
        assert all(np.array_equal(fused.table[i][key].numpy(), value) for key, value in expected.items())


def flat(nets: Hypernetworks) -> list[np.ndarray]:
    """Everything of client 1, which takes no part."""
    return [array for arrays in numpy_net(nets, 1).values() for array in arrays]
