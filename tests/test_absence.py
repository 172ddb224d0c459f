"""Clients that do not report, over every file in configs/method: rounds with a few, with one and with no uplinks.

A client is missing in one of two ways: its reply is lost after its training, or it is not reached at all and neither
receives nor trains.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from support import METHOD_PARAMS, softmax, states, world

from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.hosts.threads import torch_threads
from lightning_modules.loop import train
from lightning_modules.methods.fedavg import FedAvg
from lightning_modules.methods.l2gd import L2GD
from lightning_modules.methods.pfedcfr import PFedCFR
from lightning_modules.methods.pfedla import PFedLA
from lightning_modules.methods.pfedpm import PFedPM
from lightning_modules.prepare import PreparedRun, prepare
from pflsim.config.compose import CONFIGS, composed, composing, to_settings
from pflsim.engine.execution import EvalRequest, ReplyTask, Sent, TrainTask
from pflsim.fusion.hypernetwork import tensors
from pflsim.fusion.prototypes import passes
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.records.checkpoint_write import to_containers as plain_state
from pflsim.seeding import coin, seeded_global, torch_generator
from pflsim.servers.fedavg import FedAvg as FedAvgServer
from pflsim.servers.fedfcd import FedFCD as FedFCDServer
from pflsim.servers.l2gd import L2GD as L2GDServer
from pflsim.servers.pfedcfr import PFedCFR as PFedCFRServer
from pflsim.servers.pfedla import PFedLA as PFedLAServer
from pflsim.servers.pfedpm import PFedPM as PFedPMServer

SMALL = ["data=digits", "clients=5", "rounds=6", "batch_size=32", "model.hidden=[8]", "lr=0.05", "lockstep=false"]
ALL = tuple(range(5))
ROUNDS = 6
"""FedALP's groups are made after the third; with L2GD's default p and this seed 3 and 4 are aggregation rounds."""
COUNTERS = {"fused", "rounds", "fusions"}
"""What counts rounds in the states of the rules; FedFCD's order is that of the last round alone."""
BY_ROUND = {"fedfomo", "l2gd"}
"""Methods whose downlinks also depend on the number of the round, by a draw and by a coin."""


@cache
def job(method: str) -> PreparedRun:
    with composing([CONFIGS]):
        return prepare(to_settings(composed([f"method={method}", "executor=inline", *SMALL], [CONFIGS])))


def start(method: str, initial_round: Collection[int] = ALL) -> InlineExecutor:
    """A federation; these clients reply in the initial round, if the method has one."""
    made = job(method)
    executor = InlineExecutor(made.factory, made.dataset, made.partition, made.rule, made.federation)
    executor.start()
    if made.rule.initial_round:
        executor.server.fuse(
            [up for up in replies(executor.run(ReplyTask(), Sent.nothing(ALL))) if up.client in initial_round]
        )
    return executor


def replies(trained: Any) -> list[Uplink]:
    return [up for handle in trained.uplinks for up in handle]


def go(executor: InlineExecutor, t: int, report: Collection[int] = ALL, away: Collection[int] = ()) -> list[int]:
    """Round t, in which some report, some are away, and what the others reply is lost; returns whose arrived."""
    sent = executor.send(ALL)
    for message in sent.downlinks.values():
        check_message(executor, message)  # type: ignore[arg-type]
    reached = Sent({c: m for c, m in sent.downlinks.items() if c not in away}, sent.down_bytes)
    arrived = [up for up in replies(executor.run(TrainTask(t), reached)) if up.client in report]
    executor.server.fuse(arrived)
    return [up.client for up in arrived]


def finite(found: Any) -> bool:
    """All numbers of a state, through dataclasses, mappings and lists."""
    if isinstance(found, torch.Tensor):
        return bool(found.isfinite().all())
    if isinstance(found, dict):
        return all(map(finite, found.values()))
    return all(map(finite, found)) if isinstance(found, list) else True


def check_message(executor: InlineExecutor, message: Message) -> None:
    """Nothing but what is shared, in its shapes, and finite; a mean for every class that has one."""
    module = executor.host.module
    own = module.state_dict()
    for key, value in message.weights.items():
        assert key in (*module.shared_parameters(), *module.shared_buffers())
        assert value.shape == own[key].shape and finite(value)
    assert finite(dict(message.extra)) and all(np.isfinite(v) for v in message.numbers.values())
    if message.prototypes is not None:
        means, counts = message.prototypes.means, message.prototypes.counts
        assert means.shape == (module.net.num_classes, module.net.feature_width)
        assert len(counts) == len(means) and (counts >= 0).all() and finite(means[counts > 0])


def check(executor: InlineExecutor, t: int) -> None:
    """Nothing is anything but finite, and everything can be asked of the server and of every client."""
    assert finite(plain_state(executor.server.state)) and finite(dict(executor.server_numbers()))
    assert all(finite(state) for state in states(executor).values())
    for message in (
        *executor.server.downlinks(ALL).values(),
        *executor.server.downlinks([5], joining=True).values(),
    ):
        check_message(executor, message)
    for model, phase in (("personal", "trained"), ("personal", "received"), ("global", "received")):
        rows = executor.evaluate(EvalRequest(model, phase, ALL, ("test",), t))  # type: ignore[arg-type]
        assert all(np.isfinite(row.loss) for row in rows)
        assert {row.client for row in rows} in ({*ALL}, set() if model == "global" else {*ALL})
    newcomers = EvalRequest("personal", "received", ALL, ("test",), t, joining=True)  # as if they were new
    assert all(np.isfinite(row.loss) for row in executor.evaluate(newcomers, executor.send(ALL, joining=True)))


def kept(executor: InlineExecutor) -> dict[str, Any]:
    """The server's state without what counts rounds."""
    state = executor.server.state
    return {f.name: plain_state(getattr(state, f.name)) for f in fields(state) if f.name not in {*COUNTERS, "orders"}}


def counters(executor: InlineExecutor) -> dict[str, int]:
    state = executor.server.state
    return {f.name: getattr(state, f.name) for f in fields(state) if f.name in COUNTERS}


def equal(a: Any, b: Any) -> bool:
    """Equal to the bit, through mappings and lists."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def downlinks(executor: InlineExecutor) -> Any:
    """What every client would be sent."""
    return {client: plain_state(message) for client, message in executor.server.downlinks(ALL).items()}


def empty_round(executor: InlineExecutor, method: str, t: int, away: Collection[int]) -> None:
    """A round from which nothing comes: all that is kept and sent stays, and rounds are counted."""
    before, sent, counted = kept(executor), downlinks(executor), counters(executor)
    go(executor, t, report=(), away=away)
    assert equal(kept(executor), before)
    assert counters(executor) == {name: count + 1 for name, count in counted.items()}
    if method not in BY_ROUND:
        assert equal(downlinks(executor), sent)
    check(executor, t)


@pytest.fixture(params=METHOD_PARAMS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_client_may_be_missing(method: str, seed: int) -> None:
    """Fates by chance, in the initial round too; one round has a single report. Then a round with all clients."""
    rng = np.random.default_rng(seed)
    executor = start(method, initial_round=rng.choice(5, size=2, replace=False).tolist())
    check(executor, 0)
    for t in range(1, ROUNDS):
        fates = rng.choice(["reports", "lost", "away"], size=5, p=[0.5, 0.25, 0.25])
        report = [1 + seed] if t == 4 else [c for c in ALL if fates[c] == "reports"]
        away = [c for c in ALL if fates[c] == "away" and c not in report]
        before = states(executor)
        go(executor, t, report, away)
        after = states(executor)
        assert all(equal(before[c], after[c]) for c in away)
        check(executor, t)
    all_clients_again(executor, ROUNDS)


def all_clients_again(executor: InlineExecutor, t: int) -> None:
    """A round in which all report."""
    assert go(executor, t) == [*ALL]
    check(executor, t)


@pytest.mark.slow
@pytest.mark.parametrize("gap", [1, 2, 3, 5])
def test_a_round_without_reports(method: str, gap: int) -> None:
    """The first, one after which L2GD would have a mean, that of FedALP's groups, and one after it."""
    executor = start(method)
    for t in range(1, ROUNDS + 1):
        if t == gap:
            empty_round(executor, method, t, away=(0, 1))
        else:
            all_clients_again(executor, t)


def test_nothing_ever_arrives(method: str) -> None:
    """Neither the initial round nor six rounds: the server is where it began. Then a round with all clients."""
    executor = start(method, initial_round=())
    first = kept(executor)
    for t in range(1, ROUNDS + 1):
        empty_round(executor, method, t, away=ALL if t % 3 == 0 else ALL[:t])
    assert equal(kept(executor), first)
    assert all(count == ROUNDS + job(method).rule.initial_round for count in counters(executor).values())
    all_clients_again(executor, ROUNDS + 1)


def test_the_same_message_twice(method: str) -> None:
    """A client whose replies are lost is sent what it was sent before, while others were never reached."""
    executor = start(method, initial_round=(0,))
    go(executor, 1, report=(0, 1), away=(4,))
    sent = Sent({c: m for c, m in executor.send(ALL).downlinks.items() if c in (1, 2, 3)}, {})
    before = {c: plain_state(m) for c, m in sent.downlinks.items()}
    for t in (2, 3):
        executor.run(TrainTask(t), sent)
        executor.server.fuse([])
        check(executor, t)
    assert equal(before, {c: plain_state(m) for c, m in sent.downlinks.items()})
    for t in (4, 5):
        all_clients_again(executor, t)


def test_stragglers_of_every_method(method: str) -> None:
    """A share of every stage's batches; all of the work is what it is without a word about it, to the bit."""
    executor = start(method)
    go(executor, 1)
    own, message, ends = executor.host.shards[1], executor.send([1]).downlinks[1], list[Any]()
    for work in ((), (1.0,), (0.3,)):
        module = job(method).factory.build()
        module.load_state_dict(dict(executor.host.states[1]))
        module.round_number = 2
        with seeded_global(0, "receive", 1, 2):
            module.receive(message)  # type: ignore[arg-type]
            module.before_training(own)
        count = -(-len(own.train) // 32)
        whole = [(stage.epochs or 0) * count for stage in module.stages()]
        with torch_threads(1), seeded_global(0, "train", 1, 2):
            steps, losses = train(module, own.train, torch_generator(0, "batches", 1, 2), *work)
        assert steps == sum(math.ceil(work[0] * n) if work else n for n in whole)
        assert all(map(math.isfinite, losses.values()))
        ends.append((losses, plain_state(dict(module.state_dict()))))
    assert equal(list(ends[0]), list(ends[1])) and not equal(list(ends[0]), list(ends[2]))


# What the server makes of those who are there, by NumPy ------------------------------------------------------------

SIZES = (5, 9, 2, 7)


def weights_of(federation: Any, seed: int) -> dict[int, dict[str, np.ndarray]]:
    """Four clients' models in float64."""
    rng = np.random.default_rng(seed)
    return {i: {key: rng.normal(size=v.shape) for key, v in federation.initial.items()} for i in range(4)}


def sent_by(clients: Sequence[int], models: dict[int, dict[str, np.ndarray]]) -> list[Uplink]:
    return [
        Uplink({key: torch.from_numpy(v.copy()) for key, v in models[i].items()}, client=i, num_examples=SIZES[i])
        for i in clients
    ]


def assert_close(found: Any, expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key].numpy(), value, rtol=1e-6, atol=1e-8, err_msg=key)


@pytest.mark.parametrize("present", [(0, 1, 2, 3), (1, 3), (2,)])
def test_fedavg_is_the_weighted_mean_of_those_present(present: tuple[int, ...]) -> None:
    w = world(FedAvg, FedAvgServer(), sizes=SIZES)
    models, total = weights_of(w.federation, 0), sum(SIZES[i] for i in present)
    state = w.rule.fuse(w.rule.init(w.federation), sent_by(present, models))
    expected = {key: sum(SIZES[i] / total * models[i][key] for i in present) for key in models[0]}
    assert_close(w.rule.global_weights(state), expected)  # type: ignore[arg-type]
    assert w.rule.fuse(state, []) is state


def test_pfedcfr_mixes_the_last_uploads_of_those_who_have_reported() -> None:
    """Client 0 in both rounds, 2 in the first, 1 in the second, 3 never; then a round without any."""
    alpha, sigma = 4.0, 60.0
    client = partial(PFedCFR, alpha=alpha, r=1, unit="module")
    w = world(client, PFedCFRServer(alpha=alpha, sigma=sigma, r=1), sizes=SIZES)
    first, second = weights_of(w.federation, 1), weights_of(w.federation, 2)
    state = w.rule.fuse(w.rule.init(w.federation), sent_by((0, 2), first))
    state = w.rule.fuse(w.rule.fuse(state, []), sent_by((0, 1), second))
    last = {0: second[0], 1: second[1], 2: first[2]}
    mixed = ("net.body.fc1.weight", "net.body.fc1.bias")
    mean = {key: sum(m[key] for m in last.values()) / 3 for key in first[0] if key not in mixed}
    flat = {i: np.concatenate([m[key].ravel() for key in mixed]) for i, m in last.items()}
    for i in last:
        zeta = {m: alpha / sigma * np.exp(-((flat[i] - flat[m]) ** 2).sum() / sigma) for m in last if m != i}
        zeta[i] = 1 - sum(zeta.values())
        own = {key: sum(zeta[m] * last[m][key] for m in last) for key in mixed}
        assert_close(w.rule.downlink(state, i).weights, {**own, **mean})
    initial = {key: w.federation.initial[key].numpy() for key in mixed}
    assert_close(w.rule.downlink(state, 3).weights, {**initial, **mean})  # type: ignore[arg-type]
    assert w.rule.fuse(state, []) is state


def test_pfedla_mixes_last_reports_and_moves_those_present_alone() -> None:
    """The weights α of an absent client are untouched, and so are the rows of the table that all are mixed from."""
    w = world(PFedLA, PFedLAServer(embedding=3, hidden=(4,)), sizes=SIZES)
    initial = {key: v.double().numpy() for key, v in w.federation.initial.items()}
    models = {i: {k: v.astype(np.float32) for k, v in m.items()} for i, m in weights_of(w.federation, 3).items()}
    state, table = w.rule.init(w.federation), [initial] * 4
    for t, present in enumerate([(0, 2), (2,), ()]):
        before, alphas = tensors(state.nets), w.rule.numbers(state)
        state = w.rule.fuse(state, sent_by(present, models))
        now = w.rule.numbers(state)
        table = [models[i] if i in present else row for i, row in enumerate(table)]
        for i in range(4):
            same = all(torch.equal(a[i], b[i]) for a, b in zip(before, tensors(state.nets), strict=True))
            assert same == (
                i not in present or t == 0
            )  # while all rows are equal, it does not matter how they are mixed
            for name in ("net.body.fc1", "net.head"):
                alpha = now[f"alpha/{name}"][i]
                assert i in present or torch.equal(alpha, alphas[f"alpha/{name}"][i])
                for key in (f"{name}.weight", f"{name}.bias"):
                    mixture = sum(float(alpha[j]) * table[j][key] for j in range(4))
                    found = w.rule.downlink(state, i).weights[key].numpy()
                    np.testing.assert_allclose(found, mixture, rtol=1e-5, atol=1e-6)


def class_means(rng: np.random.Generator, counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Means [C, D] with NaN for a class that is missing, and counts [C]."""
    means = rng.normal(size=(len(counts), 5))
    means[np.array(counts) == 0] = np.nan
    return means, np.array(counts)


def reports(held: dict[int, tuple[np.ndarray, np.ndarray]]) -> list[Uplink]:
    return [
        Uplink(prototypes=Prototypes(torch.from_numpy(m), torch.from_numpy(c)), client=i, num_examples=int(c.sum()))
        for i, (m, c) in held.items()
    ]


def fused_means(held: dict[int, tuple[np.ndarray, np.ndarray]], before: np.ndarray) -> np.ndarray:
    """Count-weighted means over those who hold a class; nobody: as before."""
    after = before.copy()
    for j in range(len(before)):
        there = [(m[j], c[j]) for m, c in held.values() if c[j]]
        if there:
            after[j] = sum(c * m for m, c in there) / sum(c for _, c in there)
    return after


def test_pfedpm_and_fedproto_average_the_classes_of_those_present() -> None:
    """Class 2 has been reported once, in the first round; in the second nobody who has class 0 reports."""
    w = world(PFedPM, PFedPMServer(), sizes=SIZES)
    rng = np.random.default_rng(4)
    state, means = w.rule.init(w.federation), np.full((3, 5), np.nan)
    first = {1: class_means(rng, (4, 0, 3)), 3: class_means(rng, (2, 0, 0))}
    second = {0: class_means(rng, (0, 7, 0)), 2: class_means(rng, (0, 1, 0))}
    seen = np.zeros(3, dtype=bool)
    for held in (first, {}, second, {}):
        state = w.rule.fuse(state, reports(held))
        means = fused_means(held, means)
        for _, counts in held.values():
            seen |= counts > 0
        found = w.rule.downlink(state, 3).prototypes
        assert found is not None and np.array_equal(found.counts.numpy() > 0, seen)
        np.testing.assert_allclose(found.means.numpy()[seen], means[seen], rtol=1e-6)


def test_fedfcd_trains_its_head_on_the_classes_of_those_present() -> None:
    """The initial round has one report, round 1 none, round 2 two; round 2's order is that of a run without a gap."""
    lr, size = 0.3, 2
    made = job("fedfcd")
    rule = FedFCDServer(server_lr=lr, server_epochs=2, server_batch=size, feature_alignment=True, decision_fusion=True)
    width, classes = made.federation.feature_width, made.federation.num_classes
    rng = np.random.default_rng(5)

    def held(*which: int) -> tuple[np.ndarray, np.ndarray]:
        counts = np.array([rng.integers(1, 9) if j in which else 0 for j in range(classes)])
        means = rng.normal(size=(classes, width)).astype(np.float32)
        means[counts == 0] = np.nan
        return means, counts

    state = rule.init(made.federation)
    head = {key.rpartition(".")[2]: v.double().numpy() for key, v in state.head.items()}
    means = np.full((classes, width), np.nan)
    for t, sent in enumerate([{2: held(1, 4)}, {}, {0: held(1, 7, 8), 4: held(7)}]):
        state = rule.fuse(state, reports(sent))
        means = fused_means(sent, means)
        pairs = [(m[j], j) for m, c in sent.values() for j in range(classes) if c[j]]
        order = passes(len(pairs), 2, torch_generator(state.seed, "global_head", round_number=t)).numpy()
        assert np.array_equal(rule.numbers(state).get("order", torch.zeros(2, 0)).numpy(), order)
        for row in order:
            for index in (row[at : at + size] for at in range(0, len(row), size)):
                x, y = np.stack([pairs[i][0] for i in index]), np.array([pairs[i][1] for i in index])
                error = softmax(x @ head["weight"].T + head["bias"])
                error[np.arange(len(y)), y] -= 1
                head = {"weight": head["weight"] - lr * error.T @ x / len(y), "bias": head["bias"] - lr * error.mean(0)}
        down = rule.downlink(state, 3)
        assert down.prototypes is not None
        for name, value in head.items():
            np.testing.assert_allclose(down.weights[f"global_head.{name}"].numpy(), value, rtol=1e-4, atol=1e-5)
        known = ~np.isnan(means[:, 0])
        assert np.array_equal(down.prototypes.counts.numpy() > 0, known)
        np.testing.assert_allclose(down.prototypes.means.numpy()[known], means[known], rtol=1e-5)


def test_l2gd_keeps_its_coins_and_its_last_mean() -> None:
    """Coins 00111011010, reports wanted after rounds 2, 6 and 9; nobody reports after 6, and client 3 not in 7."""
    w = world(partial(L2GD, p=0.5), L2GDServer(p=0.5), sizes=SIZES)
    executor = w.inline()
    mean: dict[str, np.ndarray] = {}
    for t in range(1, 12):
        due = coin(0, t, 0.5)
        sent = executor.send(range(4))
        got = {c for c, m in sent.downlinks.items() if m.weights}  # type: ignore[union-attr]
        assert got == ({*range(4)} if t in (3, 10) else {3} if t == 4 else set()), t
        assert not got or due
        for c in got:
            assert_close(sent.downlinks[c].weights, mean)  # type: ignore[union-attr]
        arrived = (
            []
            if t == 6
            else [up for up in replies(executor.run(TrainTask(t), sent)) if t not in (2, 3) or up.client != 3]
        )
        if t in (2, 9):
            mean = {
                key: sum(up.weights[key].double().numpy() for up in arrived) / len(arrived)
                for key in arrived[0].weights
            }
        executor.server.fuse(arrived)
