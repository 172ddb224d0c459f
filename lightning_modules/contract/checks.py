"""The contract of a method, one function per check; the first line of its docstring names it in the output.

Every check gets a function that prepares a small run of the method, with further settings. It raises `Broken` if the
method breaks the contract, `Skipped` if the check does not apply to the method, and `Refused` if the method does not
take what the check is about.
"""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning import Trainer

from lightning_modules.base import ClientModule
from lightning_modules.hosts.base_executor import BaseExecutor, PreparedRun
from lightning_modules.hosts.client_host import ClientHost
from lightning_modules.hosts.devices import torch_threads
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.loop import epoch_orders, train
from lightning_modules.torch_defaults import default_dtype
from pflsim.data.federated import Examples
from pflsim.engine.execution import EvalRequest, Executor, FinetuneTask, ReplyTask, Sent, TrainTask
from pflsim.errors import RunError, SettingsError
from pflsim.messages import payload_bytes
from pflsim.params import snapshot
from pflsim.records.checkpoint_write import to_bytes
from pflsim.records.trace import tensors_of
from pflsim.seeding import seeded_global, torch_generator
from pflsim.types import Tensors, TrainReport

Make = Callable[..., PreparedRun]
"""Prepares a run of `CLIENTS` clients, with these overrides."""
CLIENTS = 4
SMALL = (
    "data=digits", f"clients={CLIENTS}", "rounds=2", "local_epochs=2", "batch_size=16", "lr=0.05", "model=mlp",
    "model.hidden=[8]", "executor=inline", "lockstep=false",
)  # fmt: skip
"""The settings of the run."""
BATCH_NORM = ("model=cnn_bn", "model.channels=[2,3]", "model.kernel=3", "model.padding=1", "model.hidden=6")
TRIED = {
    "uplink": ("uplink=topk", "uplink.share=1"),
    "attack": ("attack=sign_flip", "attack.fraction=0.25"),
    "aggregator": ("aggregator=median",),
    "privacy=client": ("privacy=client", "privacy.noise=1", "privacy.delta=0.01"),
    "privacy=example": ("privacy=example", "privacy.delta=1e-4", "privacy.noise=1e12", "privacy.clip=1e-12"),
}
"""What a method may take or refuse, by the settings with which it is tried."""
TOLERANCE = 1e-9
"""Largest difference between lockstep and loop in float64."""


class Broken(Exception):
    """The method breaks the contract; the message says how."""


class Skipped(Exception):
    """The check does not apply; the message says why."""


class Refused(Skipped):
    """The method refuses what is tried; the message says why."""


def require(holds: bool, otherwise: str) -> None:
    """Raise `Broken` if a condition does not hold."""
    if not holds:
        raise Broken(otherwise)


def inline(made: PreparedRun) -> InlineExecutor:
    """Return a started executor for a run."""
    executor = InlineExecutor(made)
    start(executor, made)
    return executor


def start(executor: Executor[Any], made: PreparedRun) -> None:
    """Start an executor, and run the initial round if the method has one."""
    executor.start()
    if made.rule.initial_round:
        clients = [info.id for info in made.federation.clients]
        executor.fuse(executor.run(ReplyTask(), Sent.nothing(clients)))


def survey(executor: BaseExecutor[Any], t: int) -> None:
    """Survey all clients, if the method does so before round t."""
    rule, federation, *_ = executor.server_arguments
    if rule.surveys(t, federation.rounds):
        executor.fuse(executor.run(ReplyTask(t), executor.send([info.id for info in federation.clients])))


def rounds(executor: BaseExecutor[Any], numbers: Iterable[int], cohort: Iterable[int] = range(CLIENTS)) -> list[Any]:
    """Run rounds with a cohort; returns the reports of the clients."""
    reports: list[TrainReport] = []
    for t in numbers:
        survey(executor, t)
        trained = executor.run(TrainTask(t), executor.send([*cohort]))
        executor.fuse(trained)
        reports.extend(trained.reports)
    return reports


def states(executor: Executor[Any]) -> dict[int, Tensors]:
    """Return the private state of every client."""
    return {client: dict(state) for client, state in executor.client_states()}


def equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal to the bit, through mappings and lists."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def require_equal(a: Mapping[int, Tensors], b: Mapping[int, Tensors], otherwise: str) -> None:
    """Raise `Broken` with the first client and tensor whose bits differ."""
    found = [f"client {c}, {k}" for c in a for k in a[c] if k not in b[c] or not torch.equal(a[c][k], b[c][k])]
    require(not found, f"{otherwise} ({', '.join(found[:1])})")


def rounds_run(make: Make) -> None:
    """Four rounds run, past the warm-up of FedALP, and no attribute changes outside the state."""
    executor = inline(make("rounds=4"))
    executor.host.always_check = executor.server.always_check = True
    rounds(executor, (1, 2, 3, 4))


def only_shared_tensors_are_sent(make: Make) -> None:
    """Only the tensors that `shared` selects are sent, and every byte is counted."""
    made = make()
    executor, module = inline(made), made.factory.build()
    shared = {*module.shared_parameters(), *module.shared_buffers()}
    for t in (1, 2):
        sent = executor.send(range(CLIENTS))
        trained = executor.run(TrainTask(t), sent)
        replies = [up for handle in trained.uplinks for up in executor.uplinks(handle)]
        messages = [
            (executor.downlink(handle), sent.down_bytes[c])
            for c, handle in sent.downlinks.items()
            if handle is not None
        ]
        for message, size in [*messages, *zip(replies, (r.up_bytes for r in trained.reports), strict=True)]:
            others = ", ".join(sorted(message.weights.keys() - shared))
            require(not others, f"weights contain {others}, which shared does not select; send it in extra")
            full = payload_bytes(message)
            require(size == full, f"{size} bytes are counted, but the message has {full}")
        for client, up in enumerate(replies):
            n = len(made.partition.train[client])
            require(up.client == client, f"the reply of client {client} has client={up.client}; use shard.client")
            require(up.num_examples == n, f"client {client} has {n} examples, but num_examples={up.num_examples}")
        executor.fuse(trained)


def losses_are_named_and_finite(make: Make) -> None:
    """Every client reports named, finite loss terms."""
    for report in rounds(inline(make()), (1, 2)):
        require(bool(report.losses) and report.steps > 0, f"client {report.client} reports no loss")
        for name, value in report.losses.items():
            require(isinstance(value, float) and math.isfinite(value), f"loss term {name} is {value}")


def training_helps(make: Make) -> None:
    """Two rounds with lr=0.2 lower the training loss."""
    executor = inline(make("lr=0.2"))
    request = EvalRequest("personal", "trained", tuple(range(CLIENTS)), ("train",))

    def loss() -> float:
        return sum(row.loss for row in executor.evaluate(request))

    before = loss()
    rounds(executor, (1, 2))
    after = loss()
    require(after < before, f"the sum over all training examples is {before:.4g} before and {after:.4g} after")


def evaluation_changes_nothing(make: Make) -> None:
    """Evaluations change no state, and repeat to the bit."""
    evaluated, left_alone = inline(make()), inline(make())
    for t in (1, 2):
        for executor in (evaluated, left_alone):
            rounds(executor, (t,))
        before = states(evaluated), deepcopy(evaluated.server_state())
        for model, phase in (("personal", "trained"), ("personal", "received"), ("global", "received")):
            request = EvalRequest(model, phase, tuple(range(CLIENTS)), ("test", "val"))  # type: ignore[arg-type]
            first, second = evaluated.evaluate(request), evaluated.evaluate(request)
            require(first == second, f"two evaluations of the {model} model ({phase}) differ")
        require_equal(before[0], states(evaluated), "an evaluation changes a client's state")
        require(equal(before[1], evaluated.server_state()), "an evaluation changes the server's state")
    require_equal(states(evaluated), states(left_alone), "a run with evaluations differs from one without")


def resumed_equals_straight(make: Make) -> None:
    """States survive torch.save, and a run that resumes from them equals one without a break."""
    straight, resumed = inline(make()), inline(make())
    rounds(straight, (1,))
    saved = {"server": straight.server_state(), "clients": states(straight)}
    loaded = torch.load(io.BytesIO(to_bytes(saved)), weights_only=True)
    require(equal(saved, loaded), "a saved state is not equal to itself after loading")
    resumed.restore(loaded["server"], loaded["clients"].items())
    for executor in (straight, resumed):
        rounds(executor, (2,))
    require_equal(states(straight), states(resumed), "round 2 of the resumed run differs")
    require(equal(straight.server_state(), resumed.server_state()), "the server's state differs after round 2")


def absent_clients_keep_their_state(make: Make) -> None:
    """Clients that are not in a round keep their state; the others train."""
    executor = inline(make())
    for t, cohort in ((1, (0, 2)), (2, (1, 2)), (3, (0, 3))):
        before = states(executor)
        rounds(executor, (t,), cohort)
        after = states(executor)
        for client in range(CLIENTS):
            same = equal(before[client], after[client])
            require(same != (client in cohort), f"client {client} {'does not train' if same else 'changes, absent'}")


def batch_norm_works(make: Make) -> None:
    """A model with BatchNorm works with buffers=aggregate, local and recalibrate."""
    if make().dataset.tokens is not None:
        raise Skipped("models of tokens have none")
    for buffers in ("aggregate", "local", "recalibrate"):
        executor = inline(make(*BATCH_NORM, f"buffers={buffers}"))
        rounds(executor, (1, 2))
        module = executor.host.module
        norms = {*module.shared_buffers()} if buffers == "aggregate" else set()
        for message in executor.server.downlinks(range(CLIENTS)).values():
            names = [*message.weights, *message.extra]
            require(not any("num_batches" in key for key in names), f"buffers={buffers}: counters of batches are sent")
            sent = any("running" in key for key in names)
            should = buffers == "aggregate" and bool(norms) and module.shares_statistics
            require(sent == should, f"buffers={buffers}: running statistics are {'' if sent else 'not '}sent")


def received_tensors_are_not_written(make: Make) -> None:
    """Received tensors are not written to, and the server keeps copies of what it needs."""
    executor = inline(make())
    for t in (1, 2):
        sent = executor.send(range(CLIENTS))
        down = [tensors_of(executor.downlink(handle)) for handle in sent.downlinks.values() if handle is not None]
        before = [snapshot(tensors) for tensors in down]
        trained = executor.run(TrainTask(t), sent)
        require(equal(before, down), "a client writes to the message that it receives; copy before changing")
        up = [tensors_of(reply) for handle in trained.uplinks for reply in executor.uplinks(handle)]
        before = [snapshot(tensors) for tensors in up]
        executor.fuse(trained)
        require(equal(before, up), "the server writes to a client's message; compute a new tensor instead")
        lent = {tensor.untyped_storage().data_ptr() for tensors in up for tensor in tensors.values() if tensor.numel()}
        require(lent.isdisjoint(_memory(executor.server.state)), "the server keeps a client's tensor; use snapshot")


def _memory(state: Any) -> set[int]:
    """Return the addresses of the tensors of a server's state."""
    if isinstance(state, torch.Tensor):
        return {state.untyped_storage().data_ptr()}
    if is_dataclass(state):
        return _memory([getattr(state, field.name) for field in fields(state)])
    inside = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return {address for value in inside for address in _memory(value)}


def clients_are_independent(make: Make) -> None:
    """A client's result does not depend on the clients that train before it in the same process."""
    made = make()
    together = inline(made)
    rounds(together, (1,))
    sent = together.send(range(CLIENTS))
    expected: Any = together.run(TrainTask(2), sent).states
    for client, handle in sent.downlinks.items():
        host = ClientHost(made.factory, made.dataset, made.partition, [client])
        host.states[client] = together.host.states[client]
        (reply,) = host.run(TrainTask(2), {client: handle}).values()  # type: ignore[dict-item]
        require_equal({client: expected[client]}, {client: reply.state}, "a client that trains alone differs")


class _Epochs:
    """A loader with the batches of the project's loop."""

    def __init__(self, module: ClientModule, examples: Examples, batch_size: int):
        generator = torch_generator(0, "batches", 0, 1)
        n, smallest = len(examples), module.smallest_batch
        orders = [o for s in module.stages() for o in epoch_orders(n, s, batch_size, generator, smallest)]
        self.indices = [indices for order in orders for indices in order.split(batch_size)]
        self.module, self.examples, self.length = module, examples, -(-n // batch_size)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        first = self.module.trainer.current_epoch * self.length
        return (self.examples.batch(i) for i in self.indices[first : first + self.length])


def trainer_equals_loop(make: Make) -> None:
    """`lightning.Trainer` gives the same weights as the project's loop."""
    made = make()
    executor = inline(made)
    rounds(executor, (1,))
    own = executor.host.shards[0]
    downlink = executor.downlink(executor.send([0]).downlinks[0])  # type: ignore[arg-type]
    ours, theirs = made.factory.build(), made.factory.build()
    for module in (ours, theirs):
        module.load_state_dict(dict(executor.host.states[0]))
        with torch_threads(1), seeded_global(0, "receive", 0, 1):  # a method may draw here what it trains on
            module.receive(downlink)
            module.before_training(own)
    with torch_threads(1), seeded_global(0, "train", 0, 1):
        train(ours, own.train, torch_generator(0, "batches", 0, 1))
    loader = _Epochs(theirs, own.train, made.settings.batch_size)
    trainer = Trainer(
        max_epochs=-(-len(loader.indices) // loader.length), accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with torch_threads(1), seeded_global(0, "train", 0, 1):
        trainer.fit(theirs, train_dataloaders=loader)
    require_equal({0: ours.state_dict()}, {0: theirs.state_dict()}, "the Trainer's weights differ")


def newcomers_join(make: Make) -> None:
    """A client that is held out of training joins, trains and is evaluated."""
    made = make("eval.holdout_clients=1")
    executor, new = inline(made), CLIENTS - 1
    rounds(executor, (1, 2), range(new))
    before = states(executor)[new]
    sent = executor.send([new], joining=True)
    request = EvalRequest("personal", "received", (new,), ("test", "val"), 2, joining=True)
    rows = executor.evaluate(request, sent)
    executor.store(executor.run(FinetuneTask(3, 1), sent))
    rows += executor.evaluate(replace(request, phase="trained"))
    require(all(math.isfinite(row.loss) for row in rows), "the loss of a newcomer is not finite")
    require(not equal(before, states(executor)[new]), "a newcomer does not change when it joins and trains")


def refusals(make: Make) -> dict[str, str]:
    """Return why a method refuses each of `TRIED`; "" if it takes it."""
    found = dict.fromkeys(TRIED, "")
    for what in TRIED:
        try:
            _rounds_with(make, what)
        except Refused as refused:
            found[what] = str(refused)
    return found


def _rounds_with(make: Make, what: str, numbers: Iterable[int] = (1, 2), **cohort: Any) -> InlineExecutor:
    """Return an executor after rounds with one of `TRIED`.

    Raises:
        Refused: the method does not take it.
    """
    try:
        executor = inline(make(*TRIED[what]))
        rounds(executor, numbers, **cohort)
    except (SettingsError, RunError) as error:
        reason: BaseException | None = error
        while reason and not isinstance(reason, SettingsError):
            reason = reason.__cause__
        if reason is None:
            raise
        raise Refused(str(reason)) from error
    return executor


def takes_uplink(make: Make) -> None:
    """Replies can pass a transform (uplink=topk), and one that sends everything changes nothing."""
    everything, plain = _rounds_with(make, "uplink"), inline(make())
    rounds(plain, (1, 2))
    require_equal(states(plain), states(everything), f"a client differs with {' '.join(TRIED['uplink'])}")
    same = equal(plain.server_state(), everything.server_state())
    require(same, f"the server's state differs with {' '.join(TRIED['uplink'])}")


def takes_attack(make: Make) -> None:
    """Clients can send another change (attack=sign_flip), and their own state is that without it."""
    _clients_as_without(make, "attack")


def takes_aggregator(make: Make) -> None:
    """The server can aggregate changes (aggregator=median), and a median of one client is what it sends."""
    median, plain = _rounds_with(make, "aggregator", cohort=[1]), inline(make())
    rounds(plain, (1, 2), [1])
    same = equal(plain.server_state(), median.server_state())
    require(same, "with aggregator=median and one client, the server differs")


def takes_privacy_of_clients(make: Make) -> None:
    """The server can clip changes and add noise (privacy=client), and clients train in round 1 as without it."""
    _clients_as_without(make, "privacy=client")


def _clients_as_without(make: Make, what: str) -> None:
    """Raise `Broken` if one of `TRIED` changes the state of a client in round 1."""
    _rounds_with(make, what)
    changed, plain = _rounds_with(make, what, [1]), inline(make())
    rounds(plain, [1])
    require_equal(states(plain), states(changed), f"a client's state after round 1 differs with {TRIED[what][0]}")


def takes_privacy_of_examples(make: Make) -> None:
    """Steps can be private (privacy=example): on noise alone, clients end alike with other examples."""
    own, made = _rounds_with(make, "privacy=example"), make(*TRIED["privacy=example"])
    dataset = replace(made.dataset, x=made.dataset.x[::-1].copy(), y=made.dataset.y[::-1].copy())
    other = inline(replace(made, dataset=dataset))
    rounds(other, (1, 2))
    for client, state in states(own).items():
        for name, value in states(other)[client].items():
            alike = torch.allclose(value.double(), state[name].double(), rtol=0, atol=1e-6)
            require(alike, f"client {client}, {name} depends on the examples; leave private_steps out")


def lockstep_equals_loop(make: Make) -> None:
    """Clients that train in lockstep end as they do one by one, up to rounding."""
    if not make().factory.build().lockstep:
        raise Skipped("lockstep = False")
    found = []
    for lockstep in (["lockstep=false"], ["lockstep=true", "lockstep_clients=3"]):
        with _exact(make, *lockstep) as executor:
            found.append(states(executor))
    for client, state in found[0].items():
        for name, value in state.items():
            close = torch.allclose(value.double(), found[1][client][name].double(), rtol=TOLERANCE, atol=TOLERANCE)
            require(close, f"client {client}, {name} differs; see the conditions of ClientModule.lockstep")


def evaluated_together_as_alone(make: Make) -> None:
    """Clients that are evaluated together have the results that each has alone, up to rounding."""
    everyone, splits = tuple(range(CLIENTS)), ("test", "val")
    with _exact(make) as executor:
        for model, phase in (("personal", "trained"), ("personal", "received"), ("global", "received")):
            found = []
            for groups in ((), (everyone,)):
                executor.factory = replace(executor.factory, groups=groups)
                request = EvalRequest(model, phase, everyone, splits, 2)  # type: ignore[arg-type]
                found.append(executor.evaluate(request))
            for alone, together in zip(*found, strict=True):
                pairs = {name: (value, alone.metrics[name]) for name, value in together.metrics.items()}
                pairs["loss"] = together.loss, alone.loss
                differ = [name for name, pair in pairs.items() if not np.isclose(*pair, rtol=TOLERANCE, equal_nan=True)]
                if alone.correct != together.correct or differ:
                    which = f"client {alone.client}'s {model} model ({phase})"
                    raise Broken(
                        f"{which} differs when others are evaluated with it: a score depends on other examples"
                    )


@contextmanager
def _exact(make: Make, *overrides: str) -> Iterator[InlineExecutor]:
    """Provide an executor after two rounds in float64, where only rounding can differ."""
    with default_dtype(torch.float64):
        made = make(*overrides)
        if made.dataset.tokens is None:
            exact = made.dataset.x.astype(np.float64) / made.dataset.scale
            made = replace(made, dataset=replace(made.dataset, x=exact))
        executor = inline(made)
        rounds(executor, (1, 2))
        yield executor


CHECKS = (
    rounds_run,
    only_shared_tensors_are_sent,
    losses_are_named_and_finite,
    training_helps,
    clients_are_independent,
    absent_clients_keep_their_state,
    evaluation_changes_nothing,
    evaluated_together_as_alone,
    received_tensors_are_not_written,
    resumed_equals_straight,
    newcomers_join,
    batch_norm_works,
    takes_uplink,
    takes_attack,
    takes_aggregator,
    takes_privacy_of_clients,
    takes_privacy_of_examples,
    lockstep_equals_loop,
    trainer_equals_loop,
)
