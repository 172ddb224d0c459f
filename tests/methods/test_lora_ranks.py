"""HetLoRA and FlexLoRA: rounds by hand with adapters of each client's own rank, limits, messages and refusals."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import SIZES, batches, started
from support import prepared, refusing, rounds, run_cohorts, same, states, uplinks_of, world
from torch.nn.functional import cross_entropy

from lightning_modules.contract import checks
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.hetlora import HetLoRA
from lightning_modules.nets.adjust import Adjustments
from lightning_modules.nets.frozen import frozen
from lightning_modules.nets.mlp import Mlp
from lightning_modules.training import Training
from pflsim.engine.execution import EvalRequest, TrainTask
from pflsim.messages import Message, Uplink, payload_bytes
from pflsim.servers.base import Federation
from pflsim.servers.fedavg import FedAvg as Mean
from pflsim.servers.hetlora import HetLoRA as Server

pytest.importorskip("peft")
RANKS, R, ALPHA = (1, 2, 4), 4, 6
LAYERS = {"fc1": (16, 5), "fc2": (5, 4)}
"""Inputs and outputs of the layers with adapters."""
HEAD = ("net.head.weight", "net.head.bias")
A, B = (f"net.body.fc1.lora_{each}.default.weight" for each in "AB")
ADAPTED: dict[str, Any] = {
    "adjust": Adjustments(lora={"r": R, "lora_alpha": ALPHA}),
    "model": partial(Mlp, hidden=[5, 4]),
    "training": Training(lr=0.3, batch_size=4),
}
TWICE = pytest.mark.parametrize("aggregation", ["padding", "svd"])
Values = dict[str, torch.Tensor]


def names() -> Iterator[tuple[str, str]]:
    """The names of A and B of each layer."""
    for layer in LAYERS:
        yield f"net.body.{layer}.lora_A.default.weight", f"net.body.{layer}.lora_B.default.weight"


def ranked(aggregation: str = "padding", ranks: Any = RANKS, **more: Any) -> Any:
    return world(HetLoRA, Server(ranks=ranks, aggregation=aggregation), **{**ADAPTED, **more})  # type: ignore[arg-type]


def first(tensors: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The first rows of A and columns of B."""
    cut = {a: tensors[a][:rank] for a, _ in names()} | {b: tensors[b][:, :rank] for _, b in names()}
    return {name: cut.get(name, value) for name, value in tensors.items()}


def trained(executor: InlineExecutor, client: int, t: int, values: Values, fixed: Values, lr: float) -> Values:
    """SGD on y = W₀x + α/r·B(Ax), with matrices of the client's rank and α/r of the largest one."""
    for x, y in batches(executor, client, t):
        w = fixed | {name: value.clone().requires_grad_() for name, value in values.items()}
        z = torch.from_numpy(x)
        for layer, (a, b) in zip(LAYERS, names(), strict=True):
            weight = w[f"net.body.{layer}.base_layer.weight"] + ALPHA / R * w[b] @ w[a]
            z = torch.relu(z @ weight.T + w[f"net.body.{layer}.base_layer.bias"])
        loss = cross_entropy(z @ w[HEAD[0]].T + w[HEAD[1]], torch.from_numpy(y))
        slopes = torch.autograd.grad(loss, [w[name] for name in values])
        values = {name: values[name] - lr * g for name, g in zip(values, slopes, strict=True)}
    return values


def padding(sent: Mapping[int, Any], known: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    norms = {c: np.sqrt(sum(np.sum((own[b] @ own[a]) ** 2) for a, b in names())) for c, own in sent.items()}
    found, most = dict(known), max(RANKS[c % 3] for c in sent)
    for a, b in names():
        found[a], found[b] = known[a].copy(), known[b].copy()
        found[a][:most], found[b][:, :most] = 0, 0
        for c, own in sent.items():
            rank, share = RANKS[c % 3], norms[c] / sum(norms.values())
            found[a][:rank] += share * own[a]
            found[b][:, :rank] += share * own[b]
    return found


def svd(sent: Mapping[int, Any], known: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Where singular values are 0, as those of inactive units, A keeps its rows."""
    scale, found = ALPHA / R, dict(known)
    for a, b in names():
        total = sum(SIZES[c] * scale * own[b] @ own[a] for c, own in sent.items()) / sum(SIZES[c] for c in sent)
        u, values, vt = np.linalg.svd(total)
        most = min(R, np.linalg.matrix_rank(total))
        signs = np.sign(vt[np.arange(len(vt)), np.abs(vt).argmax(1)])
        found[a], found[b] = known[a].copy(), np.zeros_like(known[b])
        found[a][:most] = (signs[:, None] * vt)[:most]
        found[b][:, :most] = (u * signs[: len(u)])[:, :most] * values[:most] / scale
    return found


@TWICE
def test_rounds_by_hand(aggregation: str) -> None:
    """In float64, with rounds of which clients of the largest rank, or of all others, are absent."""
    fuse = {"padding": padding, "svd": svd}[aggregation]
    with started(ranked(aggregation)) as executor:
        module = executor.factory.build()
        fixed = {name: value.detach().double() for name, value in frozen(module).items()}
        known = {name: value.detach().double().numpy() for name, value in module.named_parameters()}
        assert {*module.shared_parameters()} == {*known} and not known[B].any()
        for t, cohort in enumerate([(0, 1, 2, 3), (0, 1), (2,), (0, 1, 2, 3)], 1):
            own = {c: {n: torch.from_numpy(v) for n, v in first(known, RANKS[c % 3]).items()} for c in cohort}
            own = {c: trained(executor, c, t, values, fixed, 0.3) for c, values in own.items()}
            sent = {c: {name: value.numpy() for name, value in values.items()} for c, values in own.items()}
            new = fuse(sent, known)
            for name in HEAD:
                new[name] = np.average([sent[c][name] for c in cohort], 0, [SIZES[c] for c in cohort])
            made = executor.run(TrainTask(t), executor.send(cohort))
            for client, up in uplinks_of(executor, made).items():
                for name, value in up.weights.items():
                    np.testing.assert_allclose(value, sent[client][name], rtol=1e-8, atol=1e-10)
            executor.fuse(made)
            known = new
            for name, value in executor.server.state.weights.items():
                np.testing.assert_allclose(value, known[name], rtol=1e-8, atol=1e-10)


@TWICE
def test_bytes_and_messages(aggregation: str) -> None:
    """4·r_i·(inputs + outputs) of each layer and the head; clients of one rank, and newcomers, get the same message."""
    executor = ranked(aggregation).inline()
    reports = rounds(executor, 2, 4)
    head = 4 * (4 * 3 + 3)
    sizes = [sum(4 * rank * (i + o) for i, o in LAYERS.values()) + head for rank in (1, 2, 4, 1)]
    assert [report.up_bytes for report in reports] == sizes * 2
    down = executor.server.downlinks((0, 1, 2, 3))
    assert [payload_bytes(message) for message in down.values()] == sizes and down[0].weights is down[3].weights
    (joining,) = executor.server.downlinks([4], joining=True).values()
    assert same({0: joining.weights}, {0: down[1].weights})  # type: ignore[dict-item]


def fuse(server: Server, known: Mapping[str, torch.Tensor], *sent: Mapping[str, torch.Tensor]) -> Any:
    """The new weights; the clients have 1, 2, ... examples."""
    state = server.init(Federation((), known))
    return server.fuse(state, [Uplink(own, client=c, num_examples=c + 1) for c, own in enumerate(sent)]).weights


def drawn(seed: int, rank: int = 2) -> Values:
    rng = np.random.default_rng(seed)
    shapes = {A: (rank, 16), B: (5, rank), HEAD[1]: (3,)}
    return {name: torch.from_numpy(rng.normal(size=shape)) for name, shape in shapes.items()}


def test_equal_norms_and_ranks_are_the_mean_of_both_matrices() -> None:
    """1/K in HetLoRA's adapters; the head counts examples."""
    one, other = drawn(1), drawn(2)
    factor = (one[B] @ one[A]).norm() / (other[B] @ other[A]).norm()
    other[B] *= factor
    found = fuse(Server(ranks=[2]), drawn(0), one, other)
    for name, share in ((A, 1 / 2), (B, 1 / 2), (HEAD[1], 1 / 3)):
        torch.testing.assert_close(found[name], share * one[name] + (1 - share) * other[name], rtol=0, atol=1e-12)


def test_norms_of_zero_count_equally() -> None:
    one, other = drawn(1), drawn(2)
    one[B], other[B] = torch.zeros_like(one[B]), torch.zeros_like(other[B])
    found = fuse(Server(ranks=[2]), drawn(0), one, other)
    torch.testing.assert_close(found[A], (one[A] + other[A]) / 2, rtol=0, atol=1e-12)


def test_a_product_of_zero_keeps_the_adapter() -> None:
    known, sent = drawn(0), drawn(1)
    sent[B] = torch.zeros_like(sent[B])
    found = fuse(Server(ranks=[2], aggregation="svd"), known, sent)
    assert torch.equal(found[A], known[A]) and torch.equal(found[B], known[B])
    assert torch.equal(found[HEAD[1]], sent[HEAD[1]])


@TWICE
def test_matrices_of_convolutions_are_flattened(aggregation: Any) -> None:
    """PEFT's A has the kernel, [r, inputs, k, k]."""

    def shaped(own: Values) -> Values:
        return {**own, A: own[A].view(2, 4, 2, 2), B: own[B].view(5, 2, 1, 1)}

    server, some = Server(ranks=[2], aggregation=aggregation), [drawn(seed) for seed in range(3)]
    flat, found = fuse(server, *some), fuse(server, *map(shaped, some))
    assert found[A].shape == (2, 4, 2, 2) and found[B].shape == (5, 2, 1, 1)
    assert all(torch.equal(found[name].flatten(), flat[name].flatten()) for name in flat)


@pytest.mark.parametrize("client", [0, 2])
def test_one_client_of_hetlora_is_fedavg_with_adapters_of_its_rank(client: int) -> None:
    """To the bit where the rank is the model's, up to rounding where it is lower."""
    rank = RANKS[client % 3]
    plain = run_cohorts(world(FedAvg, Mean(), **ADAPTED), [[client]]).server.state.weights
    if rank == R:
        found = run_cohorts(ranked(), [[client]]).server.state.weights
        assert same({0: found}, {0: plain})  # type: ignore[dict-item]
        return
    small = world(
        FedAvg, Mean(), **{**ADAPTED, "adjust": Adjustments(lora={"r": rank, "lora_alpha": ALPHA * rank / R})}
    )
    module, executor = ranked().factory.build(), small.inline()
    start = {name: value.detach() for name, value in first(dict(module.named_parameters()), rank).items()}
    executor.server.state = replace(executor.server.state, weights=start)
    for inner, outer in zip(frozen(executor.host.module).values(), frozen(module).values(), strict=True):
        inner.copy_(outer)
    executor.fuse(executor.run(TrainTask(1), executor.send([client])))
    found = first(run_cohorts(ranked(), [[client]]).server.state.weights, rank)
    for name, value in executor.server.state.weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lockstep", ["true", "false"])
@pytest.mark.parametrize("optimizer", ["optimizer=adamw", "momentum=0.9"])
def test_what_is_beyond_the_rank_never_changes(optimizer: str, lockstep: str) -> None:
    made = prepared(*CONTRACT, optimizer, "weight_decay=0.1", f"lockstep={lockstep}")
    beyond(checks.inline(made))


def test_noise_does_not_reach_what_is_beyond_the_rank() -> None:
    """Gradients are 0 there without noise."""
    beyond(checks.inline(prepared(*CONTRACT, "privacy=example", "privacy.delta=1e-4", "privacy.noise=1", "lr=0.01")))


CONTRACT = [*checks.SMALL[:-1], "method=hetlora", "lora={r: 4}", "method.ranks=[1,2,4]"]


def beyond(executor: InlineExecutor) -> None:
    rounds(executor, 2, 4)
    for client, state in states(executor).items():
        rank = RANKS[client % 3]
        assert not state[A][rank:].any() and not state[B][:, rank:].any()
        assert state[A][:rank].all() and state[B][:, :rank].any(0).all()


def test_what_is_judged_is_what_the_server_sends() -> None:
    """Truncated; the global model has all rows. An absent client is judged by the newest model too."""
    executor = ranked().inline()
    for t, cohort in enumerate([(0, 1, 2, 3), (1, 2)], 1):
        executor.fuse(executor.run(TrainTask(t), executor.send(cohort)))
    module, weights = executor.factory.build(), executor.server.state.weights
    personal = executor.evaluate(EvalRequest("personal", "received", (0, 1, 2, 3), ("test",), 2))
    common = executor.evaluate(EvalRequest("global", "received", (0, 1, 2, 3), ("test",), 2))
    for client, rows in enumerate(zip(personal, common, strict=True)):
        test = executor.host.shards[client].test
        for row, rank in zip(rows, (RANKS[client % 3], R), strict=True):
            HetLoRA.receive(module, Message(weights=first(weights, rank)))
            with torch.no_grad():
                loss = cross_entropy(module.net(test.batch(slice(None))[0]), test.y, reduction="sum")
            assert row.loss == pytest.approx(float(loss), rel=1e-5)
    assert personal[0].loss != common[0].loss


@pytest.mark.parametrize("uplink", ["uplink=topk", "uplink=sign", "uplink=chain"])
def test_memories_of_transforms_have_the_entries_that_are_sent(uplink: str) -> None:
    executor = checks.inline(prepared(*CONTRACT, uplink))
    rounds(executor, 2, 4)
    for client, state in states(executor).items():
        rank, memory = RANKS[client % 3], {n.rpartition(".")[2]: v for n, v in state.items() if "uplink_memory" in n}
        a, b = memory[A.replace(".", "/")], memory[B.replace(".", "/")]
        assert a.shape[0] == R and a[:rank].any() and not a[rank:].any()
        assert b.shape[1] == R and b[:, :rank].any() and not b[:, rank:].any()


REFUSED: dict[str, tuple[str, ...]] = {
    "method.ranks=[4,32]": ("method.ranks=[4,32] needs lora.r=32, the largest; found 4",),
    "method.ranks=[]": ("method.ranks",),
    "method.ranks=[0,4]": ("method.ranks", "item 0"),
    "method.aggregation=mean": ("method.aggregation",),
    "attack=alie attack.fraction=0.5": ("method.ranks=[1,2,4]", "attack=none"),
    "method.ranks=[4] attack=ipm attack.fraction=0.5": ("attack=ipm", "mean"),
    "aggregator=median": ("aggregator=median", "mean"),
    "privacy=client privacy.noise=1 privacy.delta=0.01": ("privacy=client", "mean"),
    "server_optimizer=fedadam": ("server_optimizer=fedadam", "method=hetlora"),
    "model.variants=[{hidden:[8]},{hidden:[6]}]": ("hetlora", "client 1"),
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_is_refused(given: str) -> None:
    with refusing(*REFUSED[given]):
        prepared(*CONTRACT, *given.split())


def test_colluding_attackers_of_one_rank_are_taken() -> None:
    made = prepared(*CONTRACT, "method.ranks=[4]", "attack=alie", "attack.fraction=0.5")
    rounds(checks.inline(made), 2, 4)


def test_the_name_sets_the_aggregation() -> None:
    kinds = {name: prepared(*CONTRACT, f"method={name}").rule for name in ("hetlora", "flexlora")}
    assert {name: rule.aggregation for name, rule in kinds.items()} == {"hetlora": "padding", "flexlora": "svd"}  # type: ignore[attr-defined]
    assert kinds["flexlora"].ranks == (1, 2, 4)  # type: ignore[attr-defined]
