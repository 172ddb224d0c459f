"""FedFCD's equations against an independent NumPy computation in float64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import softmax, world
from torch import nn

from lightning_modules.methods.fedfcd import FedFCD
from lightning_modules.training import Training
from pflsim.fusion.prototypes import keep_missing, labelled, passes, train_head
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.seeding import torch_generator
from pflsim.servers.fedfcd import FedFCD as Server

LR, LAM = 0.3, 2.5
NAMES = ["net.body.fc1.weight", "net.body.fc1.bias", "net.head.weight", "net.head.bias"]
GLOBAL = ["global_head.weight", "global_head.bias"]


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(0, 0.5, size=shape)


class ByHand:
    """One hidden layer of 5 on 16 inputs, 3 classes, with a fixed second head, in float64."""

    def __init__(self, rng: np.random.Generator):
        self.w1, self.b1 = random(rng, 5, 16), random(rng, 5)
        self.wl, self.bl = random(rng, 3, 5), random(rng, 3)
        self.wg, self.bg = random(rng, 3, 5), random(rng, 3)
        self.gfr, self.held = random(rng, 3, 5), np.array([True, False, True])
        self.fused, self.lam = True, LAM

    def features(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        hidden = x @ self.w1.T + self.b1
        return hidden, np.maximum(hidden, 0)

    def probabilities(self, z: np.ndarray) -> np.ndarray:
        """Eqs. 7 and 8."""
        scores = z @ self.wl.T + self.bl
        return softmax(scores + z @ self.wg.T + self.bg if self.fused else scores)

    def terms(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        """Cross-entropy, and eq. 6 example by example."""
        z = self.features(x)[1]
        ce = -np.log(self.probabilities(z)[np.arange(len(y)), y]).mean()
        distances = [((z[b] - self.gfr[j]) ** 2).sum() / 5 if self.held[j] else 0.0 for b, j in enumerate(y)]
        return float(ce), self.lam * sum(distances) / len(y)

    def wrong(self, z: np.ndarray, y: np.ndarray) -> np.ndarray:
        p = self.probabilities(z)
        p[np.arange(len(y)), y] -= 1
        return p / len(y)

    def body_gradient(self, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        hidden, z = self.features(x)
        back = self.wrong(z, y) @ (self.wl + self.wg if self.fused else self.wl)
        back = back + self.lam * 2 / 5 / len(y) * np.where(self.held[y][:, None], z - self.gfr[y], 0)
        back = back * (hidden > 0)
        return [back.T @ x, back.sum(0)]

    def head_gradient(self, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        z = self.features(x)[1]
        wrong = self.wrong(z, y)
        return [wrong.T @ z, wrong.sum(0)]

    def step_body(self, gradient: list[np.ndarray]) -> None:
        self.w1, self.b1 = self.w1 - LR * gradient[0], self.b1 - LR * gradient[1]

    def step_head(self, gradient: list[np.ndarray]) -> None:
        self.wl, self.bl = self.wl - LR * gradient[0], self.bl - LR * gradient[1]

    @property
    def own(self) -> list[np.ndarray]:
        return [self.w1, self.b1, self.wl, self.bl]


def client(**settings: Any) -> tuple[FedFCD, ByHand]:
    """The same client twice, with random values, having received a head and the means of two classes of three."""
    switches = {"feature_alignment": True, "decision_fusion": True}
    switches |= {k: v for k, v in settings.items() if k in switches}
    made = partial(FedFCD, **{"lam": LAM, **settings})
    training = Training(lr=LR, batch_size=8)
    module = world(made, Server(**switches), sizes=(8,), training=training).factory.build().double()
    assert isinstance(module, FedFCD)
    hand = ByHand(np.random.default_rng(7))
    hand.fused, hand.lam = switches["decision_fusion"], LAM if switches["feature_alignment"] else 0.0
    with torch.no_grad():
        for name, value in zip(NAMES, hand.own, strict=True):
            module.get_parameter(name).copy_(torch.from_numpy(value))
    means = torch.from_numpy(hand.gfr).clone()
    means[1] = math.nan  # a missing class has any number in its row
    weights = {GLOBAL[0]: torch.from_numpy(hand.wg), GLOBAL[1]: torch.from_numpy(hand.bg)}
    module.receive(Message(weights if hand.fused else {}, Prototypes(means, torch.tensor([4, 0, 9]))))
    return module, hand


def batch(seed: int = 3) -> tuple[np.ndarray, np.ndarray, tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(seed)
    x, y = rng.uniform(size=(8, 16)), np.array([0, 1, 2, 1, 0, 2, 2, 0])
    return x, y, (torch.from_numpy(x).reshape(8, 1, 4, 4), torch.from_numpy(y))


def test_fused_decision() -> None:
    """Softmax of φ_g(z) + φ_i(z) (eqs. 7, 8), in prediction."""
    module, hand = client()
    x, _, (inputs, _) = batch()
    found = torch.softmax(module.predict(inputs), 1).detach().numpy()
    np.testing.assert_allclose(found, hand.probabilities(hand.features(x)[1]), rtol=1e-12)


def uplinks(rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray, list[Uplink]]:
    """Three clients' class means: class 2 of one client only, others missing here and there."""
    counts = np.array([[3, 4, 0], [5, 0, 0], [1, 2, 6]])
    means = [random(rng, 3, 5) for _ in counts]
    sent = []
    for i, (m, n) in enumerate(zip(means, counts, strict=True)):
        holed = torch.from_numpy(np.where(n[:, None] > 0, m, np.nan))
        sent.append(Uplink(prototypes=Prototypes(holed, torch.from_numpy(n)), client=i, num_examples=int(n.sum())))
    return means, counts, sent


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_global_means(weighting: Any) -> None:
    """C̄_j = Σ D_ij·C_ij / Σ D_ij over the clients that hold class j (eq. 5), not shrunk by their number."""
    rule = Server(feature_alignment=True, decision_fusion=False, prototype_weighting=weighting)
    w = world(partial(FedFCD, decision_fusion=False), rule, sizes=(7, 5, 9))
    means, counts, sent = uplinks(np.random.default_rng(2))
    state = rule.fuse(rule.init(w.federation), sent)
    found = rule.downlink(state, 0).prototypes
    assert found is not None
    for j in range(3):
        holders = [i for i in range(3) if counts[i, j]]
        shares = [counts[i, j] if weighting == "samples" else 1 for i in holders]
        expected = sum(p * means[i][j] for p, i in zip(shares, holders, strict=True)) / sum(shares)
        np.testing.assert_allclose(found.means[j].numpy(), expected, rtol=1e-12)
    assert found.counts.tolist() == [9, 6, 6]
    np.testing.assert_array_equal(rule.numbers(state)["gfr"].numpy(), found.means.numpy())


@pytest.mark.parametrize(("epochs", "size"), [(1, 10), (3, 2), (2, 4)])
def test_global_head(epochs: int, size: int) -> None:
    """φ_g ← φ_g − η·∇ℓ(φ_g; C, y) in mini-batches of (mean, label) pairs (eq. 4), over two fusions."""
    rule = Server(feature_alignment=False, decision_fusion=True, server_lr=LR, server_epochs=epochs, server_batch=size)
    w = world(partial(FedFCD, feature_alignment=False), rule, sizes=(7, 5, 9))
    head = {k: v.double() for k, v in w.federation.initial.items()}
    assert set(head) == set(GLOBAL)
    state = rule.init(type(w.federation)(**{**fields(w.federation), "initial": head}))
    weight, bias = head[GLOBAL[0]].numpy().copy(), head[GLOBAL[1]].numpy().copy()
    rng = np.random.default_rng(4)
    for fusion in range(2):
        means, counts, sent = uplinks(rng)
        state = rule.fuse(state, sent)
        pairs = [(means[i][j], j) for i in range(3) for j in range(3) if counts[i, j]]
        assert len(pairs) == 6
        z, y = np.stack([m for m, _ in pairs]), np.array([j for _, j in pairs])
        order = torch_generator(0, "global_head", round_number=fusion)
        for _ in range(epochs):
            turn = torch.randperm(6, generator=order).numpy()
            for start in range(0, 6, size):
                rows = turn[start : start + size]
                p = softmax(z[rows] @ weight.T + bias)
                p[np.arange(len(rows)), y[rows]] -= 1
                weight, bias = weight - LR * p.T @ z[rows] / len(rows), bias - LR * p.mean(0)
        order = torch_generator(0, "global_head", round_number=fusion)
        drawn = [torch.randperm(6, generator=order).tolist() for _ in range(epochs)]
        assert rule.numbers(state)["order"].tolist() == drawn, "the trace says in which order the head was trained"
        down = rule.downlink(state, 2)
        assert down.prototypes is None
        np.testing.assert_allclose(down.weights[GLOBAL[0]].numpy(), weight, rtol=1e-10)
        np.testing.assert_allclose(down.weights[GLOBAL[1]].numpy(), bias, rtol=1e-10)


def fields(federation: Any) -> dict[str, Any]:
    return {name: getattr(federation, name) for name in federation.__dataclass_fields__}


def test_a_head_of_layers_and_buffers_is_trained_on_a_copy() -> None:
    """Against torch.optim.SGD on a module; what was given stays as it was, buffers included."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3)).eval()
    given = {k: v.clone() + 0.1 for k, v in head.state_dict().items() if v.is_floating_point()}
    before = {k: v.clone() for k, v in given.items()}
    own = {k: v.clone() for k, v in head.state_dict().items()}
    z, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    settings: dict[str, Any] = {"lr": 0.2, "orders": passes(5, 2, torch_generator(0, "x")), "batch_size": 3}
    found = train_head(head, given, z, y, **settings)
    assert all(torch.equal(given[k], before[k]) for k in given)
    assert all(torch.equal(v, own[k]) for k, v in head.state_dict().items())

    head.load_state_dict(given, strict=False)
    optimizer, order = torch.optim.SGD(head.parameters(), lr=0.2), torch_generator(0, "x")
    for _ in range(2):
        for index in torch.randperm(5, generator=order).split(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(z[index]), y[index]).backward()
            optimizer.step()
    assert set(found) == set(given)
    for key, value in found.items():
        torch.testing.assert_close(value, head.state_dict()[key])
        assert not value.requires_grad


def test_pairs_and_kept_means() -> None:
    one = Prototypes(torch.tensor([[1.0], [9.0]]), torch.tensor([2, 0]))
    two = Prototypes(torch.tensor([[3.0], [4.0]]), torch.tensor([1, 5]))
    features, labels = labelled([one, two])
    assert features.tolist() == [[1.0], [3.0], [4.0]] and labels.tolist() == [0, 0, 1]
    kept = keep_missing(one, two)
    assert kept.means.tolist() == [[1.0], [4.0]] and kept.counts.tolist() == [2, 5]
    assert keep_missing(one, None) is one
