"""Clients that do not report, over every file in configs/method: rounds with a few, with one and with no uplinks.

A client is missing in one of two ways: its reply is lost after its training, or it is not reached at all and neither
receives nor trains.
"""

import math
from collections.abc import Collection
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support import METHOD_PARAMS, inline, prepared, states

from lightning_modules.contract.checks import equal
from lightning_modules.hosts.devices import torch_threads
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.loop import train
from lightning_modules.prepare import PreparedRun
from pflsim.engine.execution import EvalRequest, ReplyTask, Sent, TrainTask
from pflsim.messages import Message, Uplink
from pflsim.records.checkpoint_write import to_containers as plain_state
from pflsim.seeding import seeded_global, torch_generator

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
    return prepared(f"method={method}", *SMALL)


def start(method: str, initial_round: Collection[int] = ALL) -> InlineExecutor:
    """A federation; these clients reply in the initial round, if the method has one."""
    executor = inline(job(method))
    if executor.server.rule.initial_round:
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
    return all(map(finite, found)) if isinstance(found, list | tuple) else True


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
        outputs = type(module).__name__ == "FD"  # others send features
        assert means.shape == (module.net.num_classes, module.net.num_classes if outputs else module.net.feature_width)
        assert len(counts) == len(means) and (counts >= 0).all() and finite(means[counts > 0])


def check(executor: InlineExecutor, t: int) -> None:
    """Nothing is anything but finite, and everything can be asked of the server and of every client."""
    assert finite(plain_state(executor.server.state)) and finite(dict(executor.server_numbers()))
    assert all(finite(state) for state in states(executor).values())
    for message in (*executor.server.downlinks(ALL).values(), executor.server.downlinks([5], joining=True)[5]):
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


def test_any_client_may_be_missing(method: str) -> None:
    """Fates by chance, in the initial round too; one round has a single report, and one none. Then a round with all."""
    rng = np.random.default_rng(0)
    executor = start(method, initial_round=rng.choice(5, size=2, replace=False).tolist())
    check(executor, 0)
    for t in range(1, ROUNDS):
        if t == 5:
            empty_round(executor, method, t, away=(0, 1))
            continue
        fates = rng.choice(["reports", "lost", "away"], size=5, p=[0.5, 0.25, 0.25])
        report = [1] if t == 4 else [c for c in ALL if fates[c] == "reports"]
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
