"""What every method keeps, over every file in configs/method: found on disk, so a new method is held to it at once."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning import Trainer
from support import METHOD_PARAMS, METHODS, RUN_PARAMS, Records, rounds, same, states

from lightning_modules.base import ClientModule
from lightning_modules.loop import batch_indices, train
from pflsim.config.compose import CONFIGS, composed, composing, plain
from pflsim.data.federated import Examples
from pflsim.engine.execution import EvalRequest, ReplyTask, Sent, TrainTask
from pflsim.engine.simulation import Simulation
from pflsim.messages import Message
from pflsim.params import Selector, snapshot
from pflsim.run_folder.checkpoint.state import plain as plain_state
from pflsim.seeding import seeded_global, torch_generator
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.executor.ray_executor import RayExecutor
from ray_actors.hosts.inline import InlineExecutor
from ray_actors.hosts.threads import torch_threads
from ray_actors.placement.layout import Layout
from ray_actors.prepare import PreparedRun, prepare

SMALL = ["data=digits", "clients=4", "rounds=2", "local_epochs=2", "batch_size=16", "model.hidden=[8]", "lr=0.05"]
SMALL += ["lockstep=false"]  # which has its own contract: tests/test_lockstep.py


@cache
def job(method: str, *overrides: str) -> PreparedRun:
    """A small run of a method, from its YAML."""
    with composing([CONFIGS]):
        return prepare(plain(composed([f"method={method}", *SMALL, *overrides], [CONFIGS])))


def inline(made: PreparedRun) -> InlineExecutor:
    executor = InlineExecutor(made.factory, made.dataset, made.partition, made.rule, made.federation)
    executor.start()
    return executor


@pytest.fixture(params=METHOD_PARAMS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_part_of_a_method_has_its_name(method: str) -> None:
    """Client file, server file and YAML are named alike, where they exist; or the YAML is another's with settings."""
    nodes = {name: yaml.safe_load((CONFIGS / "method" / f"{name}.yaml").read_text()) for name in METHODS}
    package, _, name = nodes[method]["client"]["_target_"].rpartition(".")[0].rpartition(".")
    assert package == "lightning_modules.methods"
    assert (CONFIGS.parent / "lightning_modules" / "methods" / f"{name}.py").exists()
    if name != method:
        assert nodes[method].items() > nodes[name].items()


def test_only_what_is_shared_travels_and_every_byte_counts(method: str) -> None:
    made = job(method)
    executor, module = inline(made), made.factory.build()
    shared = set(module.shared_parameters()) | set(module.shared_buffers())
    for t in (1, 2):
        sent = executor.send(range(4))
        trained = executor.run(TrainTask(t), sent)
        for client, handle in sent.downlinks.items():
            message = executor.downlink(handle)
            assert set(message.weights) <= shared
            assert sent.down_bytes[client] == counted(message)
        ups = [up for handle in trained.uplinks for up in executor.uplinks(handle)]
        assert [up.client for up in ups] == [0, 1, 2, 3]
        for up, report in zip(ups, trained.reports, strict=True):
            assert set(up.weights) <= shared
            assert report.up_bytes == counted(up)
            assert up.num_examples == len(made.partition.train[up.client])
        executor.fuse(trained)


def test_what_is_received_is_neither_written_to_nor_kept_by_the_server(method: str) -> None:
    """On Ray all receivers of a message share its memory, which is freed when no one holds it."""
    made = job(method)
    executor = inline(made)
    executor.fuse(executor.run(ReplyTask(), Sent.nothing(range(4)))) if made.rule.initial_round else None
    for t in (1, 2):
        sent = executor.send(range(4))
        before = [snapshot(tensors_of(executor.downlink(h))) for h in sent.downlinks.values()]
        trained = executor.run(TrainTask(t), sent)
        after = [snapshot(tensors_of(executor.downlink(h))) for h in sent.downlinks.values()]
        assert equal(before, after), "a client has written to what it received"
        ups = [tensors_of(up) for handle in trained.uplinks for up in executor.uplinks(handle)]
        before = [snapshot(up) for up in ups]
        executor.fuse(trained)
        assert equal(before, [snapshot(up) for up in ups]), "the server has written to what it received"
        lent = {tensor.untyped_storage().data_ptr() for up in ups for tensor in up.values() if tensor.numel()}
        assert lent.isdisjoint(memory(executor.server.state)), "the server keeps what it received"


def tensors_of(message: Message) -> dict[str, torch.Tensor]:
    """All tensors of a message."""
    found = {**message.weights, **{f"extra {name}": tensor for name, tensor in message.extra.items()}}
    if message.prototypes is not None:
        found |= {"means": message.prototypes.means, "counts": message.prototypes.counts}
    return found


def memory(state: Any) -> set[int]:
    """Where the tensors of a server's state lie."""
    if isinstance(state, torch.Tensor):
        return {state.untyped_storage().data_ptr()}
    if is_dataclass(state):
        return memory([getattr(state, field.name) for field in fields(state)])
    inside = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return {at for value in inside for at in memory(value)}


def counted(message: Message) -> int:
    """The size of a message by NumPy's account."""
    arrays = [t.numpy() for t in (*message.weights.values(), *message.extra.values())]
    size = sum(a.size * a.dtype.itemsize for a in arrays) + 8 * len(message.numbers)
    if message.prototypes is not None:
        held = int((message.prototypes.counts.numpy() > 0).sum())
        size += held * (message.prototypes.means.shape[1] + 1) * 4
    return size


def test_losses_are_named_and_finite(method: str) -> None:
    for report in rounds(inline(job(method)), 2, 4):
        assert report.losses and report.steps > 0
        assert all(isinstance(v, float) and v == v for v in report.losses.values())


def test_training_changes_the_model_and_helps(method: str) -> None:
    executor = inline(job(method, "lr=0.2"))
    before = total_loss(executor)
    rounds(executor, 2, 4)
    assert total_loss(executor) < before


def total_loss(executor: InlineExecutor) -> float:
    return sum(row.loss for row in executor.evaluate(EvalRequest("personal", "trained", (0, 1, 2, 3), ("train",))))


def test_evaluation_changes_nothing(method: str) -> None:
    reported, left_alone = inline(job(method)), inline(job(method))
    for t in (1, 2):
        for executor in (reported, left_alone):
            rounds_from(executor, t)
        before = states(reported), plain_state(reported.server.state)
        for model, phase in (("personal", "trained"), ("personal", "received"), ("global", "received")):
            request = EvalRequest(model, phase, (0, 1, 2, 3), ("test", "val"))  # type: ignore[arg-type]
            assert reported.evaluate(request) == reported.evaluate(request)
        assert same(before[0], states(reported))
        assert equal(before[1], plain_state(reported.server.state))
    assert same(states(reported), states(left_alone)), "a run with evaluations differs from one without"


def rounds_from(executor: InlineExecutor, t: int) -> None:
    """Round t with all clients."""
    trained = executor.run(TrainTask(t), executor.send(range(4)))
    executor.fuse(trained)


def equal(a: Any, b: Any) -> bool:
    """Equal to the bit, through mappings and lists."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def test_states_survive_saving(method: str) -> None:
    """The server's state and the clients' come back equal with weights_only, and a client goes on from its own."""
    executor = inline(job(method))
    rounds(executor, 1, 4)
    saved = {"server": executor.server_state(), "clients": {c: dict(s) for c, s in executor.client_states()}}
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert equal(saved["server"], loaded["server"])
    assert same(saved["clients"], loaded["clients"])

    other = inline(job(method))
    other.host.states = loaded["clients"]
    sent = executor.send(range(4))
    for e in (executor, other):
        e.run(TrainTask(2), sent)
    assert same(states(executor), states(other))


def test_partial_participation(method: str) -> None:
    """Half of the clients a round; those who are absent keep their state."""
    executor = inline(job(method))
    for t, cohort in ((1, (0, 2)), (2, (1, 2)), (3, (0, 3))):
        before = states(executor)
        executor.fuse(executor.run(TrainTask(t), executor.send(cohort)))
        after = states(executor)
        for client in range(4):
            assert (client in cohort) != same({0: before[client]}, {0: after[client]})


@pytest.mark.slow
def test_batch_norm(method: str) -> None:
    """A model with running statistics works under every setting for them, and counters never travel."""
    for buffers in ("aggregate", "local", "recalibrate"):
        executor = inline(batch_norm_job(method, buffers))
        rounds(executor, 2, 4)
        module = executor.host.module
        norms = set(Selector(("",), norms="only").parameters(module)) & set(module.shared_parameters())
        for message in executor.server.downlinks(range(4)).values():
            names = [*message.weights, *message.extra]
            assert not any("num_batches" in key for key in names)
            travels = any("running" in key for key in names)
            assert travels == (buffers == "aggregate" and bool(norms))


def batch_norm_job(method: str, buffers: str) -> PreparedRun:
    small = [o for o in SMALL if not o.startswith("model.")]
    model = ["model=cnn_bn", "model.channels=[2,3]", "model.kernel=3", "model.padding=1", "model.hidden=6"]
    with composing([CONFIGS]):
        return prepare(plain(composed([f"method={method}", *small, *model, f"buffers={buffers}"], [CONFIGS])))


@pytest.mark.parametrize("method", RUN_PARAMS)
def test_equal_on_actors(method: str, pool: ActorPool) -> None:
    made = job(method)
    executor = RayExecutor(
        made.factory,
        made.dataset,
        made.partition,
        made.rule,
        made.federation,
        Layout.even(((0, 3), (1, 2)), 1, 0),
        pool,
    )
    executor.start()
    alone = inline(made)
    for e in (executor, alone):
        rounds(e, 2, 4, fraction=0.75)
    assert same(states(executor), states(alone))
    assert equal(executor.server_state(), alone.server_state())


@pytest.mark.parametrize("method", RUN_PARAMS)
def test_newcomers(method: str, pool: ActorPool, tmp_path: Path) -> None:
    """A client that is held out is in no round; it joins in the end, equally inline and on actors."""
    made = job(method, "eval.holdout_clients=1")
    on_actors = RayExecutor(
        made.factory,
        made.dataset,
        made.partition,
        made.rule,
        made.federation,
        Layout.even(((0, 3), (1, 2)), 1, 0),
        pool,
    )
    on_actors.start()
    alone, found = inline(made), []
    before = states(alone)[3]
    for executor in (alone, on_actors):
        records = Records()
        Simulation(executor, made.plan, tmp_path / str(len(found)), records).run()
        found.append(records)
    assert found[0].joined == found[1].joined and same(states(alone), states(on_actors))
    assert [info.id for info in made.federation.clients] == [0, 1, 2]
    for record in found[0].records:
        rows = {row.client for row in record.evaluations}
        assert {*record.cohort, *record.down_bytes, *rows, *(r.client for r in record.reports)} <= {0, 1, 2}
    (joined,) = found[0].joined
    assert joined.down_bytes == {3: counted(alone.server.downlinks([3], joining=True)[3])}
    for rows in (joined.received, joined.trained):
        assert {(row.client, row.split) for row in rows} == {(3, "test"), (3, "val")}
        assert all(row.total > 0 and row.loss == row.loss for row in rows)
    assert not same({3: before}, {3: states(alone)[3]})

    no_epochs, records = inline(made), Records()
    Simulation(no_epochs, replace(made.plan, finetune_epochs=0), tmp_path / "none", records).run()
    (left,) = records.joined
    assert left.received == joined.received
    assert [(r.correct, r.loss) for r in left.trained] == [(r.correct, r.loss) for r in left.received]
    assert left.trained != joined.trained


class Epochs:
    """A loader that gives the loop's own batches, a new permutation for every pass."""

    def __init__(self, module: ClientModule, examples: Examples):
        generator = torch_generator(0, "batches", 0, 1)
        laid = module.stages()
        self.indices = [i for stage in laid for i in batch_indices(len(examples), stage, 16, generator)]
        self.module, self.examples, self.length = module, examples, -(-len(examples) // 16)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        first = self.module.trainer.current_epoch * self.length
        return (self.examples.batch(i) for i in self.indices[first : first + self.length])


@pytest.mark.filterwarnings("ignore")
def test_lightning_trainer_gives_the_same_weights(method: str, tmp_path: Path) -> None:
    made = job(method)
    executor = inline(made)
    rounds(executor, 1, 4)
    own = executor.host.shards[0]
    downlink = executor.downlink(executor.send([0]).downlinks[0])
    ours, theirs = made.factory.build(), made.factory.build()
    for module in (ours, theirs):
        module.load_state_dict(dict(executor.host.states[0]))
        module.receive(downlink)
        module.before_training(own)
    with torch_threads(1), seeded_global(0, "train", 0, 1):
        train(ours, own.train, torch_generator(0, "batches", 0, 1))
    trainer = Trainer(
        max_epochs=sum(stage.epochs or 0 for stage in theirs.stages()),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with torch_threads(1), seeded_global(0, "train", 0, 1):
        trainer.fit(theirs, train_dataloaders=Epochs(theirs, own.train))
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
