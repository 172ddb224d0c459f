"""The host of some clients: a plain class, which the Ray executor runs inside an actor."""

import logging
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from lightning_modules.base import ClientModule
from lightning_modules.hosts.attributes import unchanged_attributes
from lightning_modules.hosts.client_factory import ClientFactory, InitialStates
from lightning_modules.hosts.devices import claim_device, torch_threads
from lightning_modules.hosts.evaluation import GroupPredictor, allowed
from lightning_modules.hosts.exchange import (
    REPLYING,
    Reply,
    anchored,
    received,
    receives_alike,
    replies,
    sent,
    unchanged,
)
from lightning_modules.hosts.failures import Failure, free_frames, kind_of, nonfinite
from lightning_modules.lockstep.batch_schedule import ClientTraining, mean_losses
from lightning_modules.lockstep.stack_training import Lockstep
from lightning_modules.lockstep.tracing import bind_state, clone_state, restored_state
from lightning_modules.loop import train
from lightning_modules.nets.net import choose_memory_format
from lightning_modules.phases import Stage
from lightning_modules.predictions import confusion, recalibrated, totals
from pflsim.data.dataset import Dataset
from pflsim.data.federated import CropFlip, Examples, Partition, Shard, StackedShards, shard, stacked_shards
from pflsim.data.sets import examples_of
from pflsim.engine.execution import AdaptTask, ClientTask, EvalRequest, FinetuneTask, ReplyTask, TrainTask
from pflsim.errors import ClientError, client_errors
from pflsim.messages import Message, payload_bytes
from pflsim.params import load, snapshot
from pflsim.seeding import newcomer_rows, seed_generators, torch_generator
from pflsim.tasks.language import IGNORED, token_metrics
from pflsim.transforms.base import Sender
from pflsim.types import EvalRow, Split, Tensors, TrainReport

logger = logging.getLogger(__name__)


class ClientHost:
    """Holds the data and the private states of some clients, and does their tasks.

    All clients use the same module in turn (one for each variant of the model). The result of a task depends on the
    client's state, its data, its message and (seed, client, round) only, so it does not depend on which clients share
    a host.

    Args:
        factory: builds the module.
        dataset: the data set; the clients' rows are copied.
        partition: the rows of each client.
        clients: the ids of this host's clients.

    Attributes:
        states: the private state of each client, from which its next task starts. Tasks do not change it.
        always_check: whether attributes are checked in every task; else in the first of each kind on this host.
    """

    always_check = False

    def __init__(self, factory: ClientFactory, dataset: Dataset, partition: Partition, clients: Sequence[int]):
        self.factory, self.clients = factory, tuple(clients)
        self.device = claim_device(factory.device, factory.gpu_share, factory.training.precision)
        with torch_threads(factory.threads):
            self.modules = {v: factory.build(v) for v in sorted({factory.variant_of(c) for c in clients})}
            self._initial = InitialStates(factory, self.modules)
            self.states: dict[int, Tensors] = self._initial
        for module in self.modules.values():
            module.to(self.device)
            if self.device.type == "cpu":
                choose_memory_format(module)
        self.module: ClientModule = next(iter(self.modules.values()))
        self.shards = {c: shard(dataset, partition, c) for c in clients}
        if factory.training.task.choice.weights_by == "tokens":
            self.shards = {c: replace(s, weighs=int((s.train.y != IGNORED).sum())) for c, s in self.shards.items()}
        if attackers := factory.attackers:
            self.shards = {c: attackers.poisoned(own) for c, own in self.shards.items()}
        self.shards = {c: own.to(self.device) for c, own in self.shards.items()}
        copied = cache(lambda own: examples_of(dataset, partition, own).to(self.device))  # clients share some sets
        for name, sets in partition.sets.items():
            for c in self.shards.keys() & {*range(len(sets))}:
                self.shards[c] = replace(self.shards[c], sets={**self.shards[c].sets, name: copied(sets[c])})
        self.stacked_shards: dict[int, StackedShards] = {}
        for stack in factory.stacks:
            if stack[0] in self.shards:
                stacked, shards = stacked_shards([self.shards[client] for client in stack])
                self.shards.update({own.client: own for own in shards})
                self.stacked_shards.update(dict.fromkeys(stack, stacked))
        self._checks, self._checked = True, set[tuple[object, ...]]()
        self._upload: tuple[Message, Message] | None = None
        """The newest message, and its copy on the device."""
        self.locksteps = {variant: Lockstep(module) for variant, module in self.modules.items()}

    def run_groups(
        self, task: ClientTask | EvalRequest, groups: Sequence[tuple[int, ...]], messages: Mapping[int, Message | None]
    ) -> dict[int, Any]:
        """Do a task for client groups in turn; the failure of one group does not end the others.

        Seeds the global generators, which the caller restores.

        Args:
            task: see `run`.
            groups: which clients work together.
            messages: see `run`.

        Returns:
            By client the result of `run`, or the `Failure` of its group. After an error of the GPU, all groups that are
            left share one failure.
        """
        results: dict[int, Any] = {}
        for number, group in enumerate(groups):
            try:
                results.update(self.run(task, {client: messages[client] for client in group}))
            except ClientError as error:
                trace = "".join(traceback.format_exception(error.__cause__ or error))
                failure = Failure(error, group, trace, kind_of(error.__cause__))
                free_frames(error)
                if failure.kind == "device":
                    failure = replace(failure, group=tuple(client for left in groups[number:] for client in left))
                results.update(dict.fromkeys(failure.group, failure))
                if failure.kind == "device":
                    break
        for client, result in results.items():
            if isinstance(result, Reply) and result.nonfinite and self.factory.on_nonfinite != "keep":
                error = ClientError(client, task.round_number, task.name, result.nonfinite)
                results[client] = Failure(error, (client,), kind="nonfinite")
        return results

    def run(self, task: ClientTask | EvalRequest, messages: Mapping[int, Message | None]) -> dict[int, Any]:
        """Do a task for one of `ClientFactory.task_groups`, all of whose clients train together if they form a stack.

        Args:
            task: what to do.
            messages: each client's message: a downlink, the global weights to evaluate a global model, or None.

        Returns:
            By client a `Reply`, or a list of `EvalRow` for an `EvalRequest`.

        Raises:
            ClientError: the task failed for a client; no state has changed.
        """
        self._upload = None  # its values may have changed
        first = next(iter(messages))
        variant = self.factory.variant_of(first)
        kind = type(task), getattr(task, "model", None), variant
        self._checks = self.always_check or kind not in self._checked
        if isinstance(task, TrainTask) and first in self.stacked_shards:
            with restored_state(self.modules[variant]):
                results: dict[int, Any] = self._train_in_lockstep(task, messages)
        else:
            results = {}
            if isinstance(task, EvalRequest) and len(messages) > 1:
                try:
                    results = self._evaluate_together(task, messages)
                except ClientError as error:  # one by one, the client is named, and less memory is needed
                    if kind_of(error.__cause__) != "error":
                        raise
                    logger.debug(f"{error}; its group is evaluated one by one")
            do: Any = {
                TrainTask: self._train, ReplyTask: self._reply, FinetuneTask: self._finetune, AdaptTask: self._adapt,
                EvalRequest: self._evaluate,
            }[type(task)]  # fmt: skip
            results = results or {client: do(task, client, message) for client, message in messages.items()}
        self._checked.add(kind)
        if isinstance(task, TrainTask) and (self.factory.uplink or self.factory.attackers):
            for client, message in messages.items():
                with client_errors(client, task.round_number, "uplink"), torch_threads(self.factory.threads):
                    results[client] = self._sent(task, message, results[client])
        return results

    def _train(self, task: TrainTask, client: int, downlink: Message | None) -> Reply:
        start = time.perf_counter()
        with self._client(task, client, "train") as own:
            self._receive(own, downlink)
            examples, work = self._augmented(own.train, task, client), task.work.get(client, 1.0)
            private = self.factory.private_steps and self.factory.private_steps.of(client, task.round_number)
            reply = self._replied(own, *train(self.module, examples, self._order(task, client), work, private))
        seconds = time.perf_counter() - start
        return replace(reply, report=replace(reply.report, seconds=seconds, gpu_bytes=self._gpu_bytes()))

    def _sent(self, task: TrainTask, downlink: Message | None, reply: Reply) -> Reply:
        """Return a reply as a malicious client, and the run's transform of uplinks, send it."""
        client, factory = reply.report.client, self.factory
        attack = factory.attackers and factory.attackers.change(client, task.round_number)
        if not (attack or factory.uplink):
            return reply
        assert downlink is not None
        sender, module = Sender(factory.seed, client, task.round_number), self.modules[factory.variant_of(client)]
        return sent(reply, downlink, module, factory.uplink, sender, attack)

    def _gpu_bytes(self) -> int:
        """Return the peak of the memory on the GPU so far, which takes 0.4 ms."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _replied(self, own: Shard, steps: int, losses: Mapping[str, float], survey: bool = False) -> Reply:
        """Have the module reply after this number of mini-batches with these mean losses, or to a survey."""
        self.module.eval()
        self.module.steps_taken = steps
        uplink = self.module.survey(own) if survey else self.module.reply(own)
        report = TrainReport(own.client, own.num_examples, steps, losses, payload_bytes(uplink))
        return Reply(report, uplink, snapshot(self.module.state_dict()), nonfinite(uplink, losses))

    def _train_in_lockstep(self, task: TrainTask, messages: Mapping[int, Message | None]) -> dict[int, Reply]:
        """Train clients of one stack together."""
        start, clients = time.perf_counter(), tuple(messages)
        first, others = clients[0], ", ".join(map(str, clients[1:]))
        phase = f"local training in lockstep with clients {others}" if others else task.name
        module = self.modules[self.factory.variant_of(first)]
        template, anchors = dict[str, torch.Tensor](), dict[str, str]()
        stages: tuple[Stage, ...] = ()
        trainings: dict[int, ClientTraining] = {}
        for client in clients:
            values, message = None, messages[client]
            if template and message is not None:
                values = received(template, anchors, self.states[client], self._uploaded(message))
            if values is None:
                with self._client(task, client, "train", "receiving") as own:
                    self._receive(own, message)
                    values, stages = clone_state(module), module.stages()
            if not template and stages and receives_alike(module):  # without stages, nothing copies the values
                template, anchors = dict(values), anchored(module)
            stacked, work = self.stacked_shards[client], task.work.get(client, 1.0)
            trainings[client] = ClientTraining(
                values, self._augmented(stacked.examples, task, client), stacked.first[client],
                self.shards[client].num_examples, self._order(task, client), stages, work=work,
            )  # fmt: skip
        with (
            client_errors(first, task.round_number, phase, clients),
            torch_threads(self.factory.threads),
            self._unchanged_attributes(buffers=False),  # lockstep replaces buffers
        ):
            seed_generators(self.factory.seed, "lockstep", first, task.round_number)
            self.locksteps[self.factory.variant_of(first)].train(list(trainings.values()))
        answers = self._replies(task, trainings)
        seconds, steps = time.perf_counter() - start, sum(training.taken for training in trainings.values())
        gpu_bytes = self._gpu_bytes()
        for client, reply in answers.items():
            share = reply.report.steps / steps if steps else 1 / len(answers)
            answers[client] = replace(reply, report=replace(reply.report, seconds=seconds * share, gpu_bytes=gpu_bytes))
        return answers

    def _replies(self, task: TrainTask, trainings: Mapping[int, ClientTraining]) -> dict[int, Reply]:
        """Return the replies of clients that have trained in lockstep."""
        answers: dict[int, Reply] = {}
        clients, losses = tuple(trainings), mean_losses(trainings.values())
        for (client, training), means in zip(trainings.items(), losses, strict=True):
            with self._client(task, client, "reply", "reply", training.values) as own:
                answers[client] = self._replied(own, training.taken, means)
            left = clients[1:] if unchanged(self.module, REPLYING) else ()
            # a buffer with two names is in the state twice
            if left and training.values.keys() >= self.module.state_dict(keep_vars=True).keys():
                trained, shards = [trainings[client] for client in left], [self.shards[client] for client in left]
                whole = len(clients) == len(self.stacked_shards[client].first)
                with client_errors(left[0], task.round_number, "reply", left), torch_threads(self.factory.threads):
                    found = replies(answers[client], trained, losses[1:], shards, whole)
                answers.update(zip(left, found, strict=True))
                break
        return answers

    def _finetune(self, task: FinetuneTask, client: int, downlink: Message | None) -> Reply:
        with self._client(task, client, "train") as own:
            self._receive(own, downlink, joining=True)
            settings = self.module.training_settings
            constant = replace(settings, lr_schedule="constant", lr_decay=1.0, lr_step=1, lr_warmup=0)
            self.module.training_settings = replace(constant, local_epochs=1, local_steps=None)
            try:
                examples, order = self._augmented(own.train, task, client), self._order(task, client)
                steps = sum(train(self.module, examples, order)[0] for _ in range(task.epochs))
                self.module.training_settings = constant
                state = self._replied(own, steps, {}).state  # a method may change its state when it replies
            finally:
                self.module.training_settings = settings
        return Reply(TrainReport(client, own.num_examples, 0), state=state)

    def _reply(self, task: ReplyTask, client: int, message: Message | None) -> Reply:
        with self._client(task, client, "open") as own:
            if message is not None:
                self._receive(own, message)
            return replace(self._replied(own, 0, {}, survey=True), state=None)

    def _adapt(self, task: AdaptTask, client: int, message: Message | None) -> Reply:
        with self.module_for(task.request, client, message) as module:
            own = self.states[client]
            changed = {k: v for k, v in module.state_dict().items() if not torch.equal(v.cpu(), own[k])}
            return Reply(TrainReport(client, self.shards[client].num_examples, 0), state=snapshot(changed))

    def _evaluate(self, request: EvalRequest, client: int, message: Message | None) -> list[EvalRow]:
        rows, own = list[EvalRow](), self.shards[client]
        with self.module_for(request, client, message) as module, module.autocast():
            predict = module.predict_global if request.model == "global" else module.predict
            if request.recalibrate:
                predict = recalibrated(predict, self._shard(request, client).train, module.criterion)
            for split in request.splits:
                scores, size = list[torch.Tensor](), self.factory.eval_batch_size
                found = totals(predict, own.split(split), module.criterion, size, scores)
                outputs = torch.cat(scores) if scores else None
                rows += self._rows(request, split, [client], [found.tolist()], outputs, own.split(split).y)
        return rows

    def _evaluate_together(
        self, request: EvalRequest, messages: Mapping[int, Message | None]
    ) -> dict[int, list[EvalRow]]:
        """Evaluate the clients of a group together where that is possible, and the others one by one."""
        first, found = next(iter(messages)), dict[tuple[Split, int], EvalRow]()
        if allowed(self.modules[self.factory.variant_of(first)], request):
            with self.module_for(request, first, messages[first]) as module, module.autocast():
                initial, size = self._initial.common[self.factory.variant_of(first)], self.factory.eval_batch_size
                predictor = GroupPredictor(module, request, self.states, initial, messages, size)
                for split in request.splits:
                    examples = {client: self.shards[client].split(split) for client in messages}
                    parts = {client: part for client, part in examples.items() if len(part)}
                    for made in predictor.predict(parts) if parts else ():
                        scores = module.criterion.scores(made.outputs)
                        counts = made.counts(module.criterion, predictor.limit).tolist()
                        rows = self._rows(request, split, made.clients, counts, scores, made.targets)
                        found.update(((split, row.client), row) for row in rows)
        results: dict[int, list[EvalRow]] = {}
        for client, message in messages.items():
            if left := tuple(split for split in request.splits if (split, client) not in found):
                rows = self._evaluate(replace(request, splits=left), client, message)
                found.update(((row.split, client), row) for row in rows)
            results[client] = [found[split, client] for split in request.splits]
        return results

    def _rows(
        self,
        request: EvalRequest,
        split: Split,
        clients: Sequence[int],
        counts: Sequence[Sequence[float]],
        scores: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> list[EvalRow]:
        """Return the rows of a split of some clients.

        Args:
            request: what is evaluated.
            split: which examples.
            clients: their ids.
            counts: of each client its `totals`.
            scores: of one client after another; None: there are no examples.
            targets: of the same examples.
        """
        classes, metrics = self.module.criterion.task.name == "classification", self.factory.metrics
        sizes = [len(self.shards[client].split(split)) for client in clients]
        rows = [
            EvalRow(client, split, request.model, request.phase, int(right) if classes else None, size, loss)
            for client, (right, loss, *_), size in zip(clients, counts, sizes, strict=True)
        ]
        if self.module.criterion.task.name == "language_model":
            return [replace(row, metrics=token_metrics(*own)) for row, own in zip(rows, counts, strict=True)]
        confuse, pool = classes and request.confusion and split == "test", split in request.pooled
        if scores is None or not (metrics or confuse or request.pooled):
            return rows
        scores, targets = scores.cpu(), targets.cpu()
        values = {metric.name: metric.by_client(scores, targets, sizes) for metric in metrics}
        found = zip(rows, scores.split(sizes), targets.split(sizes), strict=True)
        return [
            replace(
                row,
                confusion=confusion(own, labels) if confuse else (),
                metrics={name: each[at] for name, each in values.items() if each[at] is not None},
                outcomes=(own, labels) if pool else None,
            )
            for at, (row, own, labels) in enumerate(found)
        ]

    @contextmanager
    def module_for(self, request: EvalRequest, client: int, message: Message | None) -> Iterator[ClientModule]:
        """Provide the module with the values of the requested model, in evaluation mode.

        Args:
            request: which model.
            client: one of this host's.
            message: see `run`.
        """
        with self._client(request, client, "evaluate") as own:
            if request.model == "global":
                assert message is not None
                load(self.module, self._uploaded(message).weights)
                self.module.recalibrate(own.train, "global")
            else:
                if request.phase == "received":
                    self._receive(own, message, request.joining)
                self.module.before_evaluation(own)
            self.module.eval()
            yield self.module

    @contextmanager
    def _client(
        self,
        task: ClientTask | EvalRequest,
        client: int,
        stream: str,
        phase: str | None = None,
        values: dict[str, torch.Tensor] | None = None,
    ) -> Iterator[Shard]:
        """Give the module a client's state and random numbers inside the block, and name the client in its errors.

        It is an error if an attribute changes that is not part of the state, see `_unchanged_attributes`.

        Args:
            task: what the client does.
            client: its id.
            stream: purpose of the random stream.
            phase: named in errors; None: the task's name.
            values: the module's values; None: those of the client's private state.
        """
        own = self._shard(task, client)
        with (
            client_errors(client, task.round_number, phase or task.name),
            torch_threads(self.factory.threads),
        ):
            seed_generators(self.factory.seed, stream, client, task.round_number)
            if values is None:
                self.module = self.modules[self.factory.variant_of(client)]
                self.module.clear_anchors()
                load(self.module, self.states[client])  # a third of the time of load_state
                self.module.criterion.weigh(own.train.y)
                self.module.round_number, self.module.steps_taken = task.round_number, 0
            else:
                bind_state(self.module, values)
            with self._unchanged_attributes():
                yield own

    def _shard(self, task: ClientTask | EvalRequest, client: int) -> Shard:
        """Return the examples of a client, for training only as many as the task lets it have."""
        own = self.shards[client]
        if (number := getattr(task, "rows", None)) is None:
            return own
        rows = newcomer_rows(self.factory.seed, client, len(own.train))[:number].to(own.train.y.device)
        return replace(own, train=replace(own.train, x=own.train.x[rows], y=own.train.y[rows]))

    def _unchanged_attributes(self, buffers: bool = True) -> AbstractContextManager[None]:
        """Check the module's attributes in the block; the check takes a tenth of a round's time."""
        return unchanged_attributes(self.module, buffers) if self._checks else nullcontext()

    def _order(self, task: TrainTask | FinetuneTask, client: int) -> torch.Generator:
        """Return the generator that decides the order of a client's examples."""
        return torch_generator(self.factory.seed, "batches", client, task.round_number)

    def _augmented(self, examples: Examples, task: TrainTask | FinetuneTask, client: int) -> Examples:
        """Return examples for local training, which draw the client's random variants of the round."""
        if self.factory.augment == "none":
            return examples
        height, width = examples.x.shape[2:]
        generator = torch_generator(self.factory.seed, "augment", client, task.round_number)
        return replace(examples, augment=CropFlip((height, width), generator))

    def _receive(self, own: Shard, downlink: Message | None, joining: bool = False) -> None:
        assert downlink is not None
        receive = self.module.join if joining else self.module.receive
        receive(self._uploaded(downlink))
        self.module.before_training(own)
        if self.module.replaces_body(downlink):
            self.module.recalibrate(own.train)

    def _uploaded(self, message: Message) -> Message:
        """Return a message on the device; one that clients share is copied once."""
        if self._upload is None or self._upload[0] is not message:
            self._upload = message, message.to(self.device, extra=not self.module.extra_on_cpu)
        return self._upload[1]
