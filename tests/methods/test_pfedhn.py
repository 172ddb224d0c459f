"""pFedHN: the generated weights and the step by independent NumPy, the sign, and what it keeps."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import differences
from support import World, rounds, world

from lightning_modules.methods.pfedhn import PFedHN
from lightning_modules.nets.cnn import Cnn
from lightning_modules.training import Training
from pflsim.fusion.hypernetwork import Hypernetworks, rebuilt, tensors
from pflsim.messages import Uplink
from pflsim.servers.pfedhn import PFedHN as Server
from pflsim.servers.pfedhn import State


def hn(model: Any = None, training: Training | None = None, **rule: Any) -> World:
    return world(PFedHN, Server(**{"embedding": 3, "hidden": (4, 5), **rule}), model=model, training=training)


def after_rounds(w: World, count: int) -> State:
    executor = w.inline()
    rounds(executor, count, w.clients)
    return executor.server.state


def ups(w: World, state: State, clients: tuple[int, ...] = (0, 1, 2, 3), scale: float = 1.0) -> list[Uplink]:
    """Uplinks at some distance from what was sent."""
    generator = torch.Generator().manual_seed(1)
    downs = w.rule.downlinks(state, range(w.clients))
    noise = {i: {k: torch.randn(v.shape, generator=generator) for k, v in m.weights.items()} for i, m in downs.items()}
    moved = {i: {k: v + scale * noise[i][k] for k, v in m.weights.items()} for i, m in downs.items()}
    return [Uplink(moved[i], client=i, num_examples=w.federation.clients[i].num_examples) for i in clients]


# By NumPy -------------------------------------------------------------------------------------------------------------

Arrays = list[np.ndarray]
"""v [N, E], then weight and bias of every layer and head."""


def arrays(nets: Hypernetworks) -> Arrays:
    first, *rest = (t.double().numpy().copy() for t in tensors(nets))
    return [first, *(r[0] for r in rest)]


def generate(net: Arrays, client: int, hidden: int) -> Arrays:
    """θ_i, flat, a part for every tensor: embedding → ReLU layers → heads."""
    x, layers = net[0][client], list(zip(net[1::2], net[2::2], strict=True))
    for weight, bias in layers[:hidden]:
        x = np.maximum(weight @ x + bias, 0)
    return [weight @ x + bias for weight, bias in layers[hidden:]]


def doubled(state: State, seed: int = 3) -> State:
    """In float64, with random velocities, and hidden biases that keep units away from the kink."""
    generator = torch.Generator().manual_seed(seed)

    def like(nets: Hypernetworks, scale: float) -> Hypernetworks:
        parts = [t.double() + scale * torch.randn(t.shape, generator=generator).double() for t in tensors(nets)]
        return rebuilt(nets, parts)

    return replace(state, nets=like(state.nets, 0.5), velocity=like(state.velocity, 0.1))


def test_generated_weights() -> None:
    w = hn()
    state = after_rounds(w, 2)
    net = arrays(state.nets)
    for client, message in w.rule.downlinks(state, [3, 0, 2]).items():
        assert list(message.weights) == list(w.federation.initial)
        for value, expected in zip(message.weights.values(), generate(net, client, 2), strict=True):
            np.testing.assert_allclose(value.flatten().numpy(), expected, rtol=1e-4, atol=1e-6)
            assert value.untyped_storage().nbytes() == value.numel() * 4, "a message holds no more than its own"


def test_step_is_the_vector_jacobian_product() -> None:
    """φ and v by central differences of ⟨θ_i, −Δ_i⟩, the mean for φ and each client's own for v; momentum and decay."""
    w = hn(hn_lr=0.02, hn_momentum=0.7, hn_weight_decay=0.3)
    state = doubled(w.rule.init(w.federation))
    sent = [replace(u, weights={k: v.double() for k, v in u.weights.items()}) for u in ups(w, state, (0, 2, 3))]
    fused = w.rule.fuse(state, sent)
    net, speed, found = arrays(state.nets), arrays(state.velocity), arrays(fused.nets)
    back = {
        u.client: [
            theta - value.numpy().ravel()
            for theta, value in zip(generate(net, u.client, 2), u.weights.values(), strict=True)
        ]
        for u in sent
    }

    def along(client: int) -> float:
        return sum(float(t @ b) for t, b in zip(generate(net, client, 2), back[client], strict=True))

    largest = 0.0
    for part, array in enumerate(net):
        slopes = sum(differences(lambda client=client: along(client), array) for client in (0, 2, 3))
        gradient = slopes / (1 if part == 0 else 3)
        largest = max(largest, abs(gradient).max())
        expected = array - 0.02 * (0.7 * speed[part] + gradient + 0.3 * array)
        np.testing.assert_allclose(found[part], expected, rtol=1e-6, atol=1e-7)
    assert largest > 1


# What stays -----------------------------------------------------------------------------------------------------------


def test_clients_start_near_the_initial_model() -> None:
    w = hn()
    for message in w.inline().server.downlinks(range(4)).values():
        for key, value in message.weights.items():
            assert 0 < float((value - w.federation.initial[key]).abs().max()) < 1


def test_running_statistics_are_averaged_and_do_not_steer() -> None:
    w = hn(model=partial(Cnn, channels=[2], kernel=3, hidden=4, norm="batch"))
    state = after_rounds(w, 2)
    kept = {k for k in state.statistics}
    assert kept and all("running" in k for k in kept) and not kept & set(state.names)
    sent = ups(w, state)
    moved = [
        replace(u, weights={k: v + (i + 1) * (k in kept) for k, v in u.weights.items()}) for i, u in enumerate(sent)
    ]
    one, other = w.rule.fuse(state, sent), w.rule.fuse(state, moved)
    assert all(torch.equal(a, b) for a, b in zip(tensors(one.nets), tensors(other.nets), strict=True))
    n = np.array([u.num_examples for u in moved], dtype=float)
    for key in kept:
        expected = np.tensordot(n / n.sum(), np.stack([u.weights[key].numpy() for u in moved]).astype(float), 1)
        for message in w.rule.downlinks(other, range(4)).values():
            np.testing.assert_allclose(message.weights[key].numpy(), expected, rtol=1e-6)
    local = hn(model=partial(Cnn, channels=[2], kernel=3, hidden=4, norm="batch"), training=Training(buffers="local"))
    assert not after_rounds(local, 1).statistics


def test_a_newcomer_is_sent_what_the_mean_embedding_generates() -> None:
    w = hn()
    state = after_rounds(w, 2)
    net = arrays(state.nets)
    net[0] = net[0].mean(0, keepdims=True)
    for value, expected in zip(w.rule.join(state, 9).weights.values(), generate(net, 0, 2), strict=True):
        np.testing.assert_allclose(value.flatten().numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("clients", "width"), [(1, 1), (4, 2), (10, 3), (50, 13)])
def test_width_of_the_embedding(clients: int, width: int) -> None:
    """⌊1 + N/4⌋, and three hidden layers of 100."""
    w = world(PFedHN, Server(), sizes=(1,) * clients)
    nets = w.rule.init(w.federation).nets
    assert nets.embeddings.shape == (clients, width)
    assert [tuple(layer.weight.shape) for layer in nets.hidden] == [(1, 100, width), (1, 100, 100), (1, 100, 100)]
    assert len(nets.heads) == len(w.federation.initial)


@pytest.mark.parametrize(("clients", "rate"), [(1, 0.01), (3, 0.03), (12, 0.1)])
def test_the_default_rate_counts_the_clients_of_the_round(clients: int, rate: float) -> None:
    """As given by hand, to the bit."""
    found = []
    for given in (None, rate):
        w = world(PFedHN, Server(hn_lr=given), sizes=(6,) * clients)
        state = w.rule.init(w.federation)
        ups = [
            Uplink({k: v + 1 for k, v in w.federation.initial.items()}, client=i, num_examples=6)
            for i in range(clients)
        ]
        found.append(w.rule.numbers(w.rule.fuse(state, ups)))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
