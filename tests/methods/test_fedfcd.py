"""FedFCD: trained parameters, messages, the initial round, ablations, absent clients, missing classes."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import Arrays, backward, close, features, head_steps, plus, scores, slope, values
from support import BATCH_NORM, Pooled, World, agree, dataset, rounds, states, steps_of, world
from torch import nn

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.fedfcd import FedFCD
from lightning_modules.training import Training
from pflsim.engine.execution import ReplyTask, Sent
from pflsim.errors import SettingsError
from pflsim.fusion.prototypes import fuse_prototypes, passes, train_head
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.params import load
from pflsim.seeding import torch_generator
from pflsim.servers.fedfcd import FedFCD as Server

ON = {"feature_alignment": True, "decision_fusion": True}


def fedfcd(server: dict[str, Any] | None = None, **client: Any) -> World:
    shared = {k: client.get(k, True) for k in ON}
    extra = {k: client.pop(k) for k in ("sizes", "training", "model", "data") if k in client}
    return world(partial(FedFCD, **client), Server(**shared, **(server or {})), **extra)


def run(w: World, count: int = 3, fraction: float = 1.0) -> InlineExecutor:
    """Rounds after the initial round, if there is one."""
    executor = w.inline()
    if w.rule.initial_round:
        executor.fuse(executor.run(ReplyTask(), Sent.nothing(range(w.clients))))
    rounds(executor, count, w.clients, fraction)
    return executor


@pytest.mark.parametrize(("alternate", "order"), [("batch", "bh" * 6), ("epoch", "bbbhhh" * 2)])
def test_each_step_touches_only_its_own_parameters(alternate: Any, order: str) -> None:
    """12 examples make 3 batches of 4, twice."""
    w = fedfcd(alternate=alternate, lam=3.0, training=Training(lr=0.2, batch_size=4, local_epochs=2))
    seen = steps_of(run(w, 1))
    assert {name: sorted(moved, reverse=True) for name, moved in seen} == {"body": NETS[0], "head": NETS[1]}
    assert "".join(name[0] for name, _ in seen) == order


def test_round_one_has_both_after_the_initial_round() -> None:
    """The means are those of the common initial body over all clients' examples, whoever takes part in round 1."""
    w = fedfcd()
    executor = w.inline()
    before = w.rule.downlink(executor.server.state, 0)
    assert before.prototypes is None
    executor.fuse(executor.run(ReplyTask(), Sent.nothing(range(4))))
    down = w.rule.downlink(executor.server.state, 3)
    assert down.prototypes is not None and int(down.prototypes.counts.sum()) == 48
    assert any(not torch.equal(down.weights[k], before.weights[k]) for k in down.weights)
    body = w.factory.build().net.body
    y = torch.cat([s.train.y for s in executor.host.shards.values()])
    z = torch.cat([body(s.train.batch(slice(None))[0]) for s in executor.host.shards.values()]).detach()
    for j in range(3):
        torch.testing.assert_close(down.prototypes.means[j], z[y == j].mean(0))


SWITCHES = ("feature_alignment", "decision_fusion", "hierarchical")
NETS = [[f"{name}.{kind}" for kind in ("weight", "bias")] for name in ("net.body.fc1", "net.head", "global_head")]
BODY, LOCAL_HEAD, GLOBAL_HEAD = NETS


def expected_step(
    w: Arrays, other: Arrays, x: np.ndarray, y: np.ndarray, means: np.ndarray, align: bool, fuse: bool, in_turn: bool
) -> Arrays:
    """One batch of eqs. 9 and 10 with the switches, λ = 2 and η = 0.3; the second class has no mean."""
    other = other if fuse else [0 * v for v in other]
    by_features = 2 * 2 / 5 / len(y) * np.where((y != 1)[:, None], features(w, x) - means[y], 0) * align

    def gradient(w: Arrays) -> Arrays:
        z = features(w, x)
        error = slope(scores(w, x) + z @ other[0].T + other[1], y)
        return backward(w, x, error, by_features + error @ other[0])

    body = plus(w, -0.3, gradient(w))[:2]
    return body + plus(w, -0.3, gradient(body + w[2:] if in_turn else w))[2:]


def test_every_switch_has_an_effect() -> None:
    """One batch of all eight ablations and the decision, each of which ends elsewhere."""
    rng = np.random.default_rng(2)
    x, y, means = rng.uniform(size=(8, 16)), rng.integers(0, 3, size=8), rng.normal(size=(3, 5))
    batch = torch.from_numpy(x).reshape(8, 1, 4, 4), torch.from_numpy(y)
    w = [rng.normal(0, 0.5, size=shape) for shape in ((5, 16), (5,), (3, 5), (3,))]
    other = [rng.normal(0, 0.5, size=shape) for shape in ((3, 5), (3,))]
    sent = torch.from_numpy(np.where([[True], [False], [True]], means, np.nan))  # a missing class has any number
    ends: list[np.ndarray] = []
    for switches in product((True, False), repeat=3):
        chosen = dict(zip(SWITCHES, switches, strict=True))
        module = fedfcd(lam=2.0, training=Training(lr=0.3, batch_size=8), **chosen).factory.build().double()
        load(module, {k: torch.from_numpy(v) for k, v in zip(BODY + LOCAL_HEAD, w, strict=True)})
        heads = {k: torch.from_numpy(v) for k, v in zip(GLOBAL_HEAD, other, strict=True) if chosen["decision_fusion"]}
        module.receive(Message(weights=heads, prototypes=Prototypes(sent, torch.tensor([4, 0, 9]))))
        fused = features(w, x) @ other[0].T + other[1] if chosen["decision_fusion"] else 0
        np.testing.assert_allclose(module.predict(batch[0]).detach().numpy(), scores(w, x) + fused, rtol=1e-10)
        for phase in (phase for stage in module.stages() for phase in stage.phases):
            module.optimise(batch, module.make_step(phase))
        expected = expected_step(w, other, x, y, means, *switches)
        close(values(module.state_dict()), expected)
        ends.append(np.concatenate([value.ravel() for value in expected]))
    assert all(abs(a - b).max() > 1e-3 for i, a in enumerate(ends) for b in ends[:i])


def test_a_class_that_nobody_sent_keeps_its_global_mean() -> None:
    w = fedfcd()
    state = w.rule.init(w.federation)
    first = Prototypes(torch.arange(15.0).reshape(3, 5), torch.tensor([2, 3, 0]))
    second = Prototypes(torch.full((3, 5), 7.0), torch.tensor([0, 1, 0]))
    for sent in (first, second):
        state = w.rule.fuse(state, [Uplink(prototypes=sent, client=0, num_examples=5)])
    kept = w.rule.downlink(state, 0).prototypes
    assert torch.equal(kept.means[:2], torch.stack([first.means[0], second.means[1]]))
    assert kept.counts.tolist() == [2, 1, 0]
    again = w.rule.fuse(state, [])
    assert again.fusions == 3 and w.rule.downlink(again, 0).prototypes is kept


def test_what_was_received_is_forgotten() -> None:
    """A message without means leaves none of the last one's."""
    module = fedfcd().factory.build()
    batch = torch.zeros(2, 1, 4, 4), torch.tensor([0, 1])
    module.receive(Message(prototypes=Prototypes(torch.ones(3, 5), torch.ones(3, dtype=torch.int64))))
    assert float(module.objective(batch)["align"].detach()) > 0
    assert not any("global_means" in key for key in module.state_dict())
    module.receive(Message())
    assert float(module.objective(batch)["align"].detach()) == 0


def test_a_head_that_needs_maps_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"class means.*\[n, 32\]"):
        fedfcd(model=Pooled).inline()
    run(fedfcd(model=Pooled, decision_fusion=False), 1)  # nothing to train on the server


def test_batch_norm_in_the_two_steps_and_in_the_initial_round() -> None:
    """Each of the two steps on a batch passes through the body in training mode; class means do not."""
    w = fedfcd(model=BATCH_NORM, data=dataset(shape=(1, 8, 8)), sizes=(12, 12), training=Training(lr=0.1, batch_size=4))
    executor = w.inline()
    opened = executor.run(ReplyTask(), Sent.nothing(range(2)))
    (ups,) = (executor.uplinks(handle) for handle in opened.uplinks)
    module, own = w.factory.build().eval(), executor.host.shards[0].train
    with torch.no_grad():
        z = module.net.body(own.batch(slice(None))[0]).flatten(1)
    means = ups[0].prototypes
    for j in own.y.unique().tolist():
        torch.testing.assert_close(means.means[j], z[own.y == j].mean(0))
    executor.fuse(opened)
    rounds(executor, 1, 2)
    counters = [v for k, v in states(executor)[0].items() if k.startswith("net.") and "num_batches" in k]
    assert counters and all(int(v) == 2 * 3 for v in counters)


def test_without_weight_a_diverged_client_stays_alone() -> None:
    """0·NaN is NaN, but a term that is off is not there."""
    w = fedfcd(lam=0.0, decision_fusion=False)
    module = w.factory.build()
    module.receive(Message(prototypes=Prototypes(torch.full((3, 5), torch.nan), torch.ones(3, dtype=torch.int64))))
    terms = module.objective(w.inline().host.shards[0].train.batch(slice(0, 4)))
    assert all(v.isfinite() for v in terms.values())


def uplinks(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, list[Uplink]]:
    """Three clients' class means: class 2 of one client only, others missing here and there."""
    counts = np.array([[3, 4, 0], [5, 0, 0], [1, 2, 6]])
    means = rng.normal(0, 0.5, (3, 3, 5))
    sent = []
    for i, (m, n) in enumerate(zip(means, counts, strict=True)):
        holed = torch.from_numpy(np.where(n[:, None] > 0, m, np.nan))
        sent.append(Uplink(prototypes=Prototypes(holed, torch.from_numpy(n)), client=i, num_examples=int(n.sum())))
    return means, counts, sent


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_global_means(weighting: Any) -> None:
    """Those of eq. 5, which tests/pflsim/fusion/test_fusion_means.py has by hand."""
    rule = Server(feature_alignment=True, decision_fusion=False, prototype_weighting=weighting)
    w = world(partial(FedFCD, decision_fusion=False), rule, sizes=(7, 5, 9))
    _, _, sent = uplinks(np.random.default_rng(2))
    state = rule.fuse(rule.init(w.federation), sent)
    found = rule.downlink(state, 0).prototypes
    agree(found, fuse_prototypes([up.prototypes for up in sent], weighting))
    np.testing.assert_array_equal(rule.numbers(state)["gfr"].numpy(), found.means.numpy())


@pytest.mark.parametrize(("epochs", "size"), [(1, 10), (3, 2), (2, 4)])
def test_global_head(epochs: int, size: int) -> None:
    """φ_g ← φ_g − η·∇ℓ(φ_g; C, y) in mini-batches of (mean, label) pairs (eq. 4), over two fusions."""
    rule = Server(feature_alignment=False, decision_fusion=True, server_lr=0.3, server_epochs=epochs, server_batch=size)
    w = world(partial(FedFCD, feature_alignment=False), rule, sizes=(7, 5, 9))
    head = {k: v.double() for k, v in w.federation.initial.items()}
    assert set(head) == set(GLOBAL_HEAD)
    state = rule.init(replace(w.federation, initial=head))
    weight, bias = head[GLOBAL_HEAD[0]].numpy().copy(), head[GLOBAL_HEAD[1]].numpy().copy()
    rng = np.random.default_rng(4)
    for fusion in range(2):
        means, counts, sent = uplinks(rng)
        state = rule.fuse(state, sent)
        pairs = [(means[i][j], j) for i in range(3) for j in range(3) if counts[i, j]]
        order = torch_generator(0, "global_head", round_number=fusion)
        orders = [torch.randperm(6, generator=order) for _ in range(epochs)]
        weight, bias = head_steps(weight, bias, pairs, [turn.numpy() for turn in orders], 0.3, size)
        drawn = [turn.tolist() for turn in orders]
        assert rule.numbers(state)["order"].tolist() == drawn, "the trace says in which order the head was trained"
        down = rule.downlink(state, 2)
        assert down.prototypes is None
        np.testing.assert_allclose(down.weights[GLOBAL_HEAD[0]].numpy(), weight, rtol=1e-10)
        np.testing.assert_allclose(down.weights[GLOBAL_HEAD[1]].numpy(), bias, rtol=1e-10)


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
