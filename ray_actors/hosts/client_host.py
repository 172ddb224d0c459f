"""The home of some clients: a plain class, made a Ray actor where it is used."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from lightning_modules.base import ClientModule
from lightning_modules.evaluation import confusion, count
from lightning_modules.lockstep.client_training import ClientTraining
from lightning_modules.lockstep.training import Lockstep
from lightning_modules.lockstep.values import bind_state, clone_state, restored_state
from lightning_modules.loop import train
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition, Shard, StackedShards, shard, stacked_shards
from pflsim.engine.execution import EvalRequest
from pflsim.messages import Message, Uplink, payload_bytes
from pflsim.params import load, snapshot
from pflsim.seeding import seeded_global, torch_generator
from pflsim.types import EvalRow, Split, Tensors, TrainReport
from ray_actors.hosts.client_errors import client_errors
from ray_actors.hosts.client_factory import ClientFactory, InitialStates
from ray_actors.hosts.gpu import claimed
from ray_actors.hosts.threads import torch_threads


class ClientHost:
    """Holds the data and the private states of its clients; one module (of each variant of the model) works for
    all of them in turn.

    What a client computes depends on its own state, its data, what it receives and (seed, client, round) alone, so it
    does not matter which host it lives on, or with whom.

    Args:
        factory: how to build the module.
        dataset: shared, read only; the clients' rows are copied out of it.
        partition: who holds which rows.
        clients: the ids of the clients that live here.
    """

    def __init__(self, factory: ClientFactory, dataset: Dataset, partition: Partition, clients: Sequence[int]):
        self.factory, self.clients = factory, tuple(clients)
        self.device = claimed(factory.device, factory.gpu_share)
        with torch_threads(factory.threads):
            self.modules = {v: factory.build(v) for v in sorted({factory.variant_of(c) for c in clients})}
            self.states: dict[int, Tensors] = InitialStates(factory, self.modules)
        for module in self.modules.values():
            module.to(self.device)
            if self.device.type == "cpu":  # where convolutions are faster with the channels last in memory
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module: ClientModule = next(iter(self.modules.values()))
        self.shards = {c: shard(dataset, partition, c).to(self.device) for c in clients}
        self.pools: dict[int, StackedShards] = {}
        for stack in factory.stacks:
            if stack[0] in self.shards:
                pool, parts = stacked_shards([self.shards[client] for client in stack])
                self.shards.update({part.client: part for part in parts})
                self.pools.update(dict.fromkeys(stack, pool))
        self.locksteps = {variant: Lockstep(module) for variant, module in self.modules.items()}

    def ready(self) -> list[int]:
        """The clients that live here; answers when the host is up."""
        return list(self.clients)

    def train(
        self,
        round_number: int,
        clients: Sequence[int],
        positions: Sequence[int],
        *downlinks: Message,
        work: Mapping[int, float] | None = None,
    ) -> tuple[list[Uplink], list[TrainReport]]:
        """Have clients receive, train and reply, one unit (a stack, or a client) after the other.

        Args:
            round_number: from 1.
            clients: who takes part.
            positions: for each of them, the index of its message in `downlinks`.
            downlinks: the messages, each once.
            work: the share of their training that stragglers do.

        Raises:
            ClientError: with it the states of that unit are as they were.
        """
        messages = {client: downlinks[at] for client, at in zip(clients, positions, strict=True)}
        replies: dict[int, tuple[Uplink, TrainReport]] = {}
        for unit in self.factory.units(clients):
            if unit[0] in self.pools:
                with restored_state(self.modules[self.factory.variant_of(unit[0])]):
                    replies.update(self._train_together(round_number, unit, messages, work or {}))
            else:
                replies[unit[0]] = self._train(round_number, unit[0], messages[unit[0]], (work or {}).get(unit[0], 1.0))
        return [replies[c][0] for c in clients], [replies[c][1] for c in clients]

    def _train_together(
        self, round_number: int, clients: Sequence[int], downlinks: Mapping[int, Message], work: Mapping[int, float]
    ) -> dict[int, tuple[Uplink, TrainReport]]:
        start, seed = time.perf_counter(), self.factory.seed
        members: dict[int, ClientTraining] = {}
        replies: dict[int, tuple[Uplink, TrainReport]] = {}
        states: dict[int, Tensors] = {}
        with torch_threads(self.factory.threads):
            for client in clients:
                own = self.shards[client]
                with (
                    client_errors(client, round_number, "receiving"),
                    seeded_global(seed, "train", client, round_number),
                ):
                    self._wake(client, round_number)
                    self._receive(own, downlinks[client])
                    order = torch_generator(seed, "batches", client, round_number)
                    pool, first = self.pools[client].examples, self.pools[client].first[client]
                    stages = self.module.stages()
                    members[client] = ClientTraining(
                        clone_state(self.module), pool, first, len(own.train), order, stages, work=work.get(client, 1.0)
                    )
            with (
                client_errors(clients[0], round_number, _together(clients), tuple(clients)),
                seeded_global(seed, "lockstep", clients[0], round_number),
            ):
                self.locksteps[self.factory.variant_of(clients[0])].train(list(members.values()))
            for client, member in members.items():
                own = self.shards[client]
                with client_errors(client, round_number, "reply"), seeded_global(seed, "reply", client, round_number):
                    bind_state(self.module, member.values)
                    self.module.eval()
                    uplink = self.module.reply(own)
                    states[client] = snapshot(self.module.state_dict())
                report = TrainReport(client, own.num_examples, member.taken, member.losses, payload_bytes(uplink))
                report = replace(report, gpu_bytes=self._gpu_bytes())
                replies[client] = uplink, report
        self.states.update(states)
        seconds, steps = time.perf_counter() - start, sum(t.taken for t in members.values())
        share = {client: t.taken / steps if steps else 1 / len(members) for client, t in members.items()}
        return {c: (up, replace(report, seconds=seconds * share[c])) for c, (up, report) in replies.items()}

    def _train(self, round_number: int, client: int, downlink: Message, work: float) -> tuple[Uplink, TrainReport]:
        start, own, seed = time.perf_counter(), self.shards[client], self.factory.seed
        with (
            client_errors(client, round_number, "local training"),
            torch_threads(self.factory.threads),
            seeded_global(seed, "train", client, round_number),
        ):
            self._wake(client, round_number)
            self._receive(own, downlink)
            order = torch_generator(seed, "batches", client, round_number)
            steps, losses = train(self.module, own.train, order, work)
            self.module.eval()
            uplink = self.module.reply(own)
            self.states[client] = snapshot(self.module.state_dict())
        up_bytes, seconds = payload_bytes(uplink), time.perf_counter() - start
        return uplink, TrainReport(client, own.num_examples, steps, losses, up_bytes, seconds, self._gpu_bytes())

    def finetune(
        self, round_number: int, epochs: int, clients: Sequence[int], positions: Sequence[int], *downlinks: Message
    ) -> None:
        """Have newcomers receive and train, one after the other: so many times the module's schedule, one epoch long
        where it takes the run's length. Their replies go nowhere.

        Args:
            round_number: whose learning rate and random numbers they use.
            epochs: how often, from 0.
            clients: who they are.
            positions: for each of them, the index of its message in `downlinks`.
            downlinks: the messages, each once.
        """
        for client, at in zip(clients, positions, strict=True):
            own, seed = self.shards[client], self.factory.seed
            with (
                client_errors(client, round_number, "fine-tuning"),
                torch_threads(self.factory.threads),
                seeded_global(seed, "train", client, round_number),
            ):
                self._wake(client, round_number)
                self._receive(own, downlinks[at], joining=True)
                with _one_epoch(self.module):
                    order = torch_generator(seed, "batches", client, round_number)
                    for _ in range(epochs):
                        train(self.module, own.train, order)
                self.module.eval()
                self.module.reply(own)
                self.states[client] = snapshot(self.module.state_dict())

    def open(self, clients: Sequence[int]) -> tuple[list[Uplink], list[TrainReport]]:
        """Have clients reply as they are, before the first round; changes nothing."""
        replies = [self._open(client) for client in clients]
        return [up for up, _ in replies], [report for _, report in replies]

    def _open(self, client: int) -> tuple[Uplink, TrainReport]:
        own = self.shards[client]
        with (
            client_errors(client, 0, "initial round"),
            torch_threads(self.factory.threads),
            seeded_global(self.factory.seed, "open", client, 0),
        ):
            self._wake(client, 0)
            self.module.eval()
            uplink = self.module.reply(own)
        return uplink, TrainReport(client, own.num_examples, 0, {}, payload_bytes(uplink))

    def evaluate(
        self, request: EvalRequest, clients: Sequence[int], positions: Sequence[int], *messages: Message
    ) -> list[EvalRow]:
        """Judge models without changing anything.

        Args:
            request: which model, when, on which splits.
            clients: which of the clients that live here.
            positions: for each, the index of its message; empty where no message is needed.
            messages: downlinks (personal model as received) or the global weights (global model).
        """
        chosen = [messages[at] for at in positions] if positions else [Message()] * len(clients)
        rows: list[EvalRow] = []
        for client, message in zip(clients, chosen, strict=True):
            with self.module_for(request, client, message):
                rows.extend(self._count(request, client, split) for split in request.splits)
        return rows

    @contextmanager
    def module_for(self, request: EvalRequest, client: int, message: Message) -> Iterator[ClientModule]:
        """The module as a client's judged model, ready to predict, inside the block.

        Args:
            request: which model, when.
            client: one of those that live here.
            message: see `evaluate`.
        """
        round_number = request.round_number
        with (
            client_errors(client, round_number, "evaluation"),
            torch_threads(self.factory.threads),
            seeded_global(self.factory.seed, "evaluate", client, round_number),
        ):
            self._wake(client, round_number)
            self._dress(request, self.shards[client], message)
            yield self.module

    def _dress(self, request: EvalRequest, own: Shard, message: Message) -> None:
        """Give the module the values it is judged with."""
        if request.model == "global":
            load(self.module, message.weights)
            self._recalibrate(own)
        else:
            if request.phase == "received":
                self._receive(own, message, request.joining)
            self.module.before_evaluation(own)
        self.module.eval()

    def _count(self, request: EvalRequest, client: int, split: Split) -> EvalRow:
        examples = self.shards[client].split(split)
        predict = self.module.predict_global if request.model == "global" else self.module.predict
        pairs: list[torch.Tensor] | None = [] if request.confusion and split == "test" else None
        correct, loss = count(predict, examples, self.factory.eval_batch_size, pairs)
        taken = confusion(pairs or [])
        return EvalRow(client, split, request.model, request.phase, correct, len(examples), loss, taken)

    def private_states(self, clients: Sequence[int] | None = None) -> dict[int, Tensors]:
        """The private states of some clients, or of all that live here."""
        return {client: self.states[client] for client in (self.clients if clients is None else clients)}

    def _gpu_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _wake(self, client: int, round_number: int) -> None:
        self.module = self.modules[self.factory.variant_of(client)]
        self.module.clear_anchors()
        self.module.load_state_dict(dict(self.states[client]))
        self.module.round_number = round_number

    def _receive(self, own: Shard, downlink: Message, joining: bool = False) -> None:
        take_in = self.module.join if joining else self.module.receive
        take_in(downlink.to(self.device, extra=not self.module.extra_on_cpu))
        self.module.before_training(own)
        if self.module.replaces_body(downlink):
            self._recalibrate(own)

    def _recalibrate(self, own: Shard) -> None:
        if self.factory.training.buffers == "recalibrate":
            self.module.recalibrate(own.train)


def _together(clients: Sequence[int]) -> str:
    others = ", ".join(map(str, clients[1:]))
    return f"local training in lockstep with clients {others}" if others else "local training"


@contextmanager
def _one_epoch(module: ClientModule) -> Iterator[None]:
    """Where the module's schedule takes the run's length, that is one epoch inside the block."""
    given = module.training_settings
    module.training_settings = replace(given, local_epochs=1, local_steps=None)
    try:
        yield
    finally:
        module.training_settings = given
