"""Ditto: w is FedAvg's, v is pulled towards w as received; v is what counts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import World, rounds, same, softmax, states, trained_states, world
from torch import nn

from lightning_modules.methods.ditto import Ditto
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.local import Local
from lightning_modules.nets.mlp import Mlp
from lightning_modules.nets.net import Net
from lightning_modules.phases import Alternate, Schedule
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.errors import SettingsError
from pflsim.messages import Message
from pflsim.seeding import torch_generator
from pflsim.servers.fedavg import FedAvg as Server
from pflsim.servers.local import Local as LocalServer

ALL = (0, 1, 2, 3)
Found = dict[int, dict[str, torch.Tensor]]


def ditto(client: Any = Ditto, lam: float = 0.7, **settings: Any) -> World:
    return world(partial(client, lam=lam), Server(), **settings)


def after(w: World, count: int = 3) -> Found:
    executor = w.inline()
    rounds(executor, count, 4, fraction=0.75)
    return states(executor)


def part(found: Found, name: str) -> Found:
    """One of the two models, named as the net of any other method."""
    return {
        c: {"net" + k.removeprefix(name): v for k, v in s.items() if k.startswith(name + ".")} for c, s in found.items()
    }


@pytest.mark.parametrize("training", [Training(lr=0.1, batch_size=4, local_epochs=2), Training(lr=0.1, local_steps=5)])
def test_without_its_pull_the_personal_model_is_local(training: Training) -> None:
    """To the bit: the same examples in the same order. With it, it is not."""
    local = after(world(Local, LocalServer(), training=training))
    assert same(part(after(ditto(lam=0.0, training=training)), "personal"), local)
    assert not same(part(after(ditto(training=training)), "personal"), local)


@pytest.mark.parametrize("lam", [0.0, 3.0])
def test_the_common_model_is_fedavgs(lam: float) -> None:
    """To the bit, whatever λ: v has no say in it."""
    assert same(part(after(ditto(lam=lam)), "net"), after(world(FedAvg, Server())))


class Swapped(Ditto):
    def schedule(self) -> Schedule:
        (both,) = super().schedule()
        assert isinstance(both, Alternate)
        return (Alternate(both.phases[::-1], every="batch"),)


class OneAfterTheOther(Ditto):
    """All of w's training, then all of v's, on the same batches."""

    def schedule(self) -> Schedule:
        (both,) = super().schedule()
        assert isinstance(both, Alternate)
        return both.phases


def test_the_order_of_the_two_steps_does_not_matter() -> None:
    assert same(after(ditto()), after(ditto(Swapped)))


def test_the_anchor_is_the_model_as_received() -> None:
    """Also where w has finished its training before v begins: the first gradient of the pull is λ(v − w^t)."""
    w = ditto(OneAfterTheOther, sizes=(4, 4, 4, 4))
    executor = w.inline()
    rounds(executor, 2, 4)
    received, before = executor.server.state.weights, states(executor)[0]
    seen: list[dict[str, torch.Tensor]] = []
    module = executor.host.module
    real = module.personal_objective  # type: ignore[operator]

    def watched(batch: Any) -> Any:
        anchors = {k.replace("/", "."): v.clone() for k, v in module.received.named_buffers()}  # type: ignore[union-attr]
        seen.append(anchors)
        return real(batch)

    module.personal_objective = watched  # type: ignore[assignment]
    after = trained_states(executor, executor.run(TrainTask(3), executor.send((0,))))
    assert seen and all(
        torch.equal(a["personal" + k.removeprefix("net")], v) for a in seen for k, v in received.items()
    )
    assert not same({0: before}, {0: after[0]})


def test_the_pull_has_its_gradient() -> None:
    module = ditto(lam=0.5).factory.build()
    initial = module.shared_tensors()
    module.receive(Message(weights={k: v - 2 for k, v in initial.items()}))
    terms = module.personal_objective((torch.zeros(2, 1, 4, 4), torch.tensor([0, 1])))  # type: ignore[operator]
    gradients = torch.autograd.grad(terms["prox"], list(module.personal.parameters()))  # type: ignore[union-attr]
    assert all(torch.allclose(g, torch.ones_like(g), atol=1e-6) for g in gradients), "λ(v − w^t) = 0.5 · 2"


def test_the_default_pulls() -> None:
    """λ=1, not 0 with which it would be Local."""
    assert world(Ditto, Server()).factory.build().lam == 1.0  # type: ignore[comparison-overlap]


def gradient(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of softmax(x·Wᵀ), [C, 17]."""
    return (softmax(x @ weights.T) - y).T @ x / len(x)


def test_two_rounds_by_hand() -> None:
    """Softmax regression in NumPy float64: w and v of all clients, and the server's mean."""
    lr, lam, sizes = 0.4, 1.5, (12, 7, 20, 9)
    w = ditto(lam=lam, model=partial(Mlp, hidden=[]), training=Training(lr=lr, batch_size=4))
    executor = w.inline()
    rounds(executor, 2, 4)
    keys = ("net.head.weight", "net.head.bias")
    initial = np.column_stack([w.federation.initial[k].double().numpy() for k in keys])  # [C, 17]
    common, v = initial.copy(), {c: initial.copy() for c in ALL}
    for t in (1, 2):
        trained = []
        for client in ALL:
            own = executor.host.shards[client].train
            x = np.column_stack([own.x.numpy().reshape(len(own), -1) / 255.0, np.ones(len(own))])
            permutation = torch.randperm(len(own), generator=torch_generator(0, "batches", client, t)).numpy()
            y, mine = np.eye(3)[own.y.numpy()], common.copy()
            for start in range(0, len(own), 4):
                rows = permutation[start : start + 4]
                mine = mine - lr * gradient(mine, x[rows], y[rows])
                v[client] = v[client] - lr * (gradient(v[client], x[rows], y[rows]) + lam * (v[client] - common))
            trained.append(mine)
        common = np.einsum("k,kij->ij", np.array(sizes) / sum(sizes), np.stack(trained))
    found = states(executor)
    for client in ALL:
        personal = np.column_stack([found[client]["personal" + k.removeprefix("net")].numpy() for k in keys])
        np.testing.assert_allclose(personal, v[client], rtol=1e-4, atol=2e-6)
    mean = np.column_stack([executor.server.state.weights[k].numpy() for k in keys])
    np.testing.assert_allclose(mean, common, rtol=1e-4, atol=2e-6)


def test_the_personal_model_is_reported_and_the_global_one_beside_it() -> None:
    one, other = ditto().inline(), world(FedAvg, Server()).inline()
    for executor in (one, other):
        rounds(executor, 3, 4)
    requests = [
        EvalRequest(model, phase, ALL, ("test",), 3)
        for model, phase in (("personal", "trained"), ("global", "received"))
    ]  # type: ignore[arg-type]
    personal, common = (one.evaluate(request) for request in requests)
    assert common == other.evaluate(requests[1]), "the global model is w, under FedAvg to the bit"
    assert all(a.loss != b.loss for a, b in zip(personal, common, strict=True))
    module = one.host.factory.build().eval()
    module.load_state_dict(states(one)[2])
    inputs, labels = one.host.shards[2].test.batch(slice(None))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(module.personal(inputs), labels, reduction="sum")  # type: ignore[operator]
    assert personal[2].loss == pytest.approx(float(loss), rel=1e-6)


def test_only_the_common_model_travels() -> None:
    executor = ditto().inline()
    sent = executor.send(ALL)
    trained = executor.run(TrainTask(1), sent)
    ups = [up for h in trained.uplinks for up in executor.uplinks(h)]
    assert all(key.startswith("net.") for up in ups for key in up.weights)
    assert {r.up_bytes for r in trained.reports} == set(sent.down_bytes.values()) == {(16 * 5 + 5 + 5 * 3 + 3) * 4}


def normed(input_shape: tuple[int, ...], classes: int) -> Net:
    body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 6), nn.ReLU())
    return Net(body, nn.Linear(6, classes), (6,), classes)


def test_recalibration_is_of_the_received_model() -> None:
    """w's running statistics are measured anew, v keeps its own."""
    training = Training(lr=0.1, batch_size=5, buffers="recalibrate")
    executor = ditto(model=normed, training=training).inline()
    rounds(executor, 2, 4)
    module, own = executor.host.module, executor.host.shards[1]
    module.load_state_dict(states(executor)[1])
    module.recalibrate(own.train)
    inputs, _ = own.train.batch(slice(None))
    found = module.state_dict()
    torch.testing.assert_close(found["net.body.1.running_mean"], inputs.flatten(1).mean(0))
    assert torch.equal(found["personal.body.1.running_mean"], states(executor)[1]["personal.body.1.running_mean"])
    average = world(FedAvg, Server(), model=normed, training=training).inline()
    rounds(average, 2, 4)
    request = EvalRequest("global", "received", ALL, ("test",), 2)
    assert executor.evaluate(request) == average.evaluate(request)


def test_a_negative_pull_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"method\.lam"):
        ditto(lam=-0.1)


def test_a_newcomer_starts_from_the_servers_model() -> None:
    w = ditto()
    module, sent = w.factory.build(), {k: v + 1 for k, v in w.federation.initial.items()}
    module.join(Message(weights=sent))
    inputs = torch.rand(3, 1, 4, 4)
    assert torch.equal(module.predict(inputs), module.predict_global(inputs))
    assert torch.equal(module.get_parameter("personal.head.bias"), sent["net.head.bias"])
