"""FedFCD: trained parameters, messages, the initial round, ablations, absent clients, missing classes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from support import Records, World, dataset, plan, rounds, same, softmax, states, world
from torch import nn

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.loop import train
from lightning_modules.methods.fedfcd import FedFCD
from lightning_modules.nets.cnn import Cnn, MapCnn
from lightning_modules.nets.net import Net
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, ReplyTask, Sent
from pflsim.engine.simulation import Simulation
from pflsim.errors import SettingsError
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


@pytest.mark.parametrize("alternate", ["batch", "epoch"])
def test_each_step_touches_only_its_own_parameters(alternate: Any) -> None:
    w = fedfcd(alternate=alternate, lam=3.0, training=Training(lr=0.2, batch_size=4, local_epochs=2))
    executor = run(w, 1)
    module, own = w.factory.build(), executor.host.shards[0]
    module.receive(executor.downlink(executor.send([0]).downlinks[0]))
    seen: list[tuple[str, set[str]]] = []
    real = module.optimise

    def watched(batch: Any, step: Any) -> Any:
        before = {k: v.clone() for k, v in module.state_dict().items()}
        terms = real(batch, step)
        seen.append((step.phase.name, {k for k, v in module.state_dict().items() if not torch.equal(v, before[k])}))
        return terms

    module.optimise = watched  # type: ignore[method-assign]
    _, losses = train(module, own.train, torch_generator(0, "batches", 0, 1))
    assert {name: moved for name, moved in seen} == {
        "body": {"net.body.fc1.weight", "net.body.fc1.bias"},
        "head": {"net.head.weight", "net.head.bias"},
    }
    order = "bh" * 6 if alternate == "batch" else "bbbhhh" * 2
    assert "".join(name[0] for name, _ in seen) == order, "12 examples make 3 batches of 4, twice"
    assert set(losses) == {"body/ce", "body/align", "head/ce"} and losses["body/align"] > 0


def test_a_downlink_has_the_same_sections_for_all_clients() -> None:
    executor = run(fedfcd(), 1)
    one, other = (executor.server.downlinks(range(2))[i] for i in range(2))
    assert one.weights is other.weights and one.prototypes is other.prototypes


def test_the_server_can_be_recomputed_from_the_trace(tmp_path: Path) -> None:
    """GFR and head of every downlink by NumPy from the uplinks of the round before, the initial round included."""
    w = fedfcd(server={"server_lr": 0.5, "server_batch": 4})
    made = plan(4, 3, trace_rounds=(0, 1, 2, 3), initial_round=True, eval_every=3)
    made = replace(made, cohorts=((0, 2), (0, 1, 2, 3), (1, 3)))
    Simulation(w.inline(), made, tmp_path, Records()).run()

    gfr = np.full((3, 5), np.nan)
    weight, bias = (w.federation.initial[f"global_head.{k}"].double().numpy() for k in ("weight", "bias"))
    for t in range(4):
        folder = tmp_path / "trace" / f"round_{t:04d}"
        ups = [load_file(p) for p in sorted(folder.glob("up_*"))]
        downs = [load_file(p) for p in sorted(folder.glob("down_*"))]
        assert len(ups) == [4, 2, 4, 2][t] and len(downs) == (len(ups) if t else 0)
        for down in downs:  # the fusion of the round before
            np.testing.assert_allclose(down["prototypes/means"], gfr, rtol=1e-6)
            np.testing.assert_allclose(down["weights/global_head.weight"], weight, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(down["weights/global_head.bias"], bias, rtol=1e-4, atol=1e-6)
        means = np.stack([up["prototypes/means"] for up in ups]).astype(float)
        counts = np.stack([up["prototypes/counts"] for up in ups])
        for j in range(3):
            if counts[:, j].any():
                gfr[j] = (counts[:, j, None] * means[:, j]).sum(0) / counts[:, j].sum()
        pairs = [(k, j) for k in range(len(ups)) for j in range(3) if counts[k, j]]
        z, y = np.stack([means[pair] for pair in pairs]), np.array([j for _, j in pairs])
        (order,) = load_file(folder / "server.safetensors")["order"]
        for start in range(0, len(y), 4):
            rows = order[start : start + 4]
            p = softmax(z[rows] @ weight.T + bias)
            p[np.arange(len(rows)), y[rows]] -= 1
            weight, bias = weight - 0.5 * p.T @ z[rows] / len(rows), bias - 0.5 * p.mean(0)
        with safe_open(folder / "server.safetensors", framework="np") as file:
            assert set(file.keys()) == {"gfr", "gfr_counts", "head/weight", "head/bias", "order"}
            np.testing.assert_allclose(file.get_tensor("gfr"), gfr, rtol=1e-6)
            np.testing.assert_allclose(file.get_tensor("head/weight"), weight, rtol=1e-4, atol=1e-6)


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
BODY, LOCAL_HEAD, GLOBAL_HEAD = (
    [f"{name}.{kind}" for kind in ("weight", "bias")] for name in ("net.body.fc1", "net.head", "global_head")
)


def expected_step(
    w: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray, means: np.ndarray, align: bool, fuse: bool, in_turn: bool
) -> dict[str, np.ndarray]:
    """One batch of eqs. 9 and 10 with the switches, λ = 2 and η = 0.3, by NumPy."""

    def forward(body: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        z = np.maximum(x @ body[0].T + body[1], 0)
        scores = z @ w[LOCAL_HEAD[0]].T + w[LOCAL_HEAD[1]]
        p = softmax(scores + (z @ w[GLOBAL_HEAD[0]].T + w[GLOBAL_HEAD[1]] if fuse else 0))
        return z, (p - np.eye(3)[y]) / len(y)

    body = [w[key] for key in BODY]
    z, error = forward(body)
    back = error @ (w[LOCAL_HEAD[0]] + (w[GLOBAL_HEAD[0]] if fuse else 0))
    if align:
        back = back + 2 * 2 / z.size * (z - means[y])
    back = back * (z > 0)
    body = [body[0] - 0.3 * back.T @ x, body[1] - 0.3 * back.sum(0)]
    if in_turn:
        z, error = forward(body)
    head = [w[LOCAL_HEAD[0]] - 0.3 * error.T @ z, w[LOCAL_HEAD[1]] - 0.3 * error.sum(0)]
    return dict(zip(BODY + LOCAL_HEAD, body + head, strict=True))


def test_every_switch_has_an_effect() -> None:
    """One batch of all eight ablations by NumPy, each of which ends elsewhere."""
    rng = np.random.default_rng(2)
    x, y, means = rng.uniform(size=(8, 16)), rng.integers(0, 3, size=8), rng.normal(size=(3, 5))
    batch = torch.from_numpy(x).reshape(8, 1, 4, 4), torch.from_numpy(y)
    w = {key: rng.normal(0, 0.5, size=shape) for key, shape in (
        *zip(BODY, ((5, 16), (5,)), strict=True),
        *zip(LOCAL_HEAD, ((3, 5), (3,)), strict=True),
        *zip(GLOBAL_HEAD, ((3, 5), (3,)), strict=True),
    )}  # fmt: skip
    ends: list[np.ndarray] = []
    for switches in product((True, False), repeat=3):
        chosen = dict(zip(SWITCHES, switches, strict=True))
        module = fedfcd(lam=2.0, training=Training(lr=0.3, batch_size=8), **chosen).factory.build().double()
        load(module, {k: torch.from_numpy(w[k]) for k in BODY + LOCAL_HEAD})
        heads = {k: torch.from_numpy(w[k]) for k in GLOBAL_HEAD if chosen["decision_fusion"]}
        module.receive(Message(weights=heads, prototypes=Prototypes(torch.from_numpy(means), torch.ones(3).long())))
        for phase in (phase for stage in module.stages() for phase in stage.phases):
            module.optimise(batch, module.make_step(phase))
        expected = expected_step(w, x, y, means, *switches)
        for key, value in expected.items():
            np.testing.assert_allclose(module.get_parameter(key).detach().numpy(), value, rtol=1e-10, err_msg=key)
        ends.append(np.concatenate([value.ravel() for value in expected.values()]))
    assert all(abs(a - b).max() > 1e-3 for i, a in enumerate(ends) for b in ends[:i])


def test_no_weight_of_the_alignment_is_no_alignment() -> None:
    zero, off = run(fedfcd(lam=0.0)), run(fedfcd(feature_alignment=False))
    assert same(states(zero), states(off))
    message = off.server.downlinks([0])[0]
    assert message.prototypes is None and message.weights
    without = run(fedfcd(decision_fusion=False)).server.downlinks([0])[0]
    assert without.prototypes is not None and not without.weights


def test_a_class_that_nobody_sent_keeps_its_global_mean() -> None:
    w = fedfcd()
    state = w.rule.init(w.federation)
    first = Prototypes(torch.arange(15.0).reshape(3, 5), torch.tensor([2, 3, 0]))
    second = Prototypes(torch.full((3, 5), 7.0), torch.tensor([0, 1, 0]))
    for sent in (first, second):
        state = w.rule.fuse(state, [Uplink(prototypes=sent, client=0, num_examples=5)])
    kept = w.rule.downlink(state, 0).prototypes
    assert kept is not None
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


def test_the_order_of_the_means_changes_with_round_and_seed() -> None:
    w = fedfcd(server={"server_batch": 1, "server_lr": 1.0})
    sent = [Uplink(prototypes=Prototypes(torch.eye(3, 5) + i, torch.tensor([1, 1, 1])), client=i) for i in range(4)]
    state = w.rule.init(w.federation)
    later = replace(state, fusions=1)
    other = w.rule.init(replace(w.federation, seed=1))
    heads = [w.rule.fuse(s, sent).head["global_head.weight"] for s in (state, later, other)]
    assert not torch.allclose(heads[0], heads[1]) and not torch.allclose(heads[0], heads[2])


def test_the_global_head_is_nobodys_own() -> None:
    executor = run(fedfcd(), 1)
    module = executor.host.module
    assert isinstance(module, FedFCD) and module.global_head is not None
    assert not any(p.requires_grad for p in module.global_head.parameters())
    pointers = {p.data_ptr() for p in module.parameters()}
    assert len(pointers) == len(list(module.parameters()))
    assert executor.evaluate(EvalRequest("global", "received", (0,), ("test",))) == []


def test_per_client_starts_share_the_global_head_only() -> None:
    w = world(partial(FedFCD), Server(**ON), init="per_client")
    found = states(w.inline())
    assert all(torch.equal(found[0]["global_head.weight"], s["global_head.weight"]) for s in found.values())
    assert not torch.equal(found[0]["net.head.weight"], found[1]["net.head.weight"])


def test_feature_maps_are_flattened_for_the_means() -> None:
    model = partial(MapCnn, hidden_channels=2, channels=3, kernel=3, padding=1, hidden=4)
    w = fedfcd(model=model, lam=2.0)
    executor = run(w, 2)
    down = executor.server.downlinks([0])[0]
    assert down.prototypes is not None and down.prototypes.means.shape == (3, w.federation.feature_width)
    assert set(down.weights) == {f"global_head.{k}" for k in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")}
    module = executor.host.module
    module.receive(down)
    inputs, labels = executor.host.shards[0].train.batch(slice(None))
    assert float(module.objective((inputs, labels))["align"].detach()) > 0


class Pooled(Net):
    """A head that needs maps."""

    def __init__(self, shape: tuple[int, ...], classes: int):
        head = nn.Sequential(nn.Conv2d(2, classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        super().__init__(nn.Conv2d(shape[0], 2, 1), head, (2, *shape[1:]), classes)


def test_a_head_that_needs_maps_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"class means.*\[n, 32\]"):
        fedfcd(model=Pooled).inline()
    run(fedfcd(model=Pooled, decision_fusion=False), 1)  # nothing to train on the server


def test_recalibration_is_for_what_was_received() -> None:
    """Nothing of the body travels, so its statistics are the client's own under every setting of `buffers`."""
    model = partial(Cnn, channels=[2, 3], kernel=3, padding=1, hidden=6, norm="batch")
    found = []
    for buffers in ("aggregate", "local", "recalibrate"):
        training = Training(lr=0.1, batch_size=5, buffers=buffers)  # type: ignore[arg-type]
        executor = run(fedfcd(model=model, data=dataset(shape=(1, 8, 8)), training=training), 2)
        received = executor.evaluate(EvalRequest("personal", "received", (0, 1, 2, 3), ("test",)))
        found.append((received, states(executor)))
    assert found[0][0] == found[1][0] == found[2][0]
    assert same(found[0][1], found[1][1]) and same(found[0][1], found[2][1])


def test_batch_norm_in_the_two_steps_and_in_the_initial_round() -> None:
    """Each of the two steps on a batch passes through the body in training mode; class means do not."""
    model = partial(Cnn, channels=[2, 3], kernel=3, padding=1, hidden=6, norm="batch")
    w = fedfcd(model=model, data=dataset(shape=(1, 8, 8)), sizes=(12, 12), training=Training(lr=0.1, batch_size=4))
    executor = w.inline()
    opened = executor.run(ReplyTask(), Sent.nothing(range(2)))
    (ups,) = (executor.uplinks(handle) for handle in opened.uplinks)
    module, own = w.factory.build().eval(), executor.host.shards[0].train
    with torch.no_grad():
        z = module.net.body(own.batch(slice(None))[0]).flatten(1)
    means = ups[0].prototypes
    assert means is not None
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
