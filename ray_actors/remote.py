"""The executor on Ray: client hosts and the server are actors, and messages go between them by object reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray import ObjectRef

from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.execution import Judge, Sent, Trained
from pflsim.messages import Message, Uplink
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import EvalRow, Tensors, TrainReport
from ray_actors.placement import Layout
from ray_actors.pool import Pool
from ray_actors.recipe import Recipe

FETCHED = 10
"""Clients whose private states the driver fetches at a time."""


class RayExecutor:
    """Hosts as actors with explicit CPU and GPU requests; a handle is an object reference.

    Args:
        recipe, dataset, partition: for the hosts.
        rule, federation: for the server.
        layout: which clients live on which actor, and what an actor asks for.
        pool: where the actors come from.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: Dataset,
        partition: Partition,
        rule: ServerRule[Any],
        federation: Federation,
        layout: Layout,
        pool: Pool,
    ):
        self._parts = recipe, dataset, partition, rule, federation
        self.layout, self._host_of = layout, layout.host_of()
        self.server: Any = pool.server()
        self.hosts = pool.hosts(len(layout.groups), layout.num_cpus, layout.num_gpus)

    def start(self) -> None:
        """Settle the actors and wait until all of them are up."""
        recipe, dataset, partition, rule, federation = self._parts
        data, rows = ray.put(dataset), ray.put(partition)
        settled = [self.server.settle.remote(rule, federation, recipe.threads)]
        for host, group in zip(self.hosts, self.layout.groups, strict=True):
            settled.append(host.settle.remote(recipe, data, rows, group))
        ray.get(settled)

    def send(self, clients: Sequence[int], new: bool = False) -> Sent[ObjectRef]:
        """Have the server store the messages; the driver gets references and sizes."""
        sent: dict[int, tuple[ObjectRef, int]] = ray.get(self.server.send.remote(clients, new))
        return Sent({c: ref for c, (ref, _) in sent.items()}, {c: size for c, (_, size) in sent.items()})

    def train(self, round_number: int, sent: Sent[ObjectRef]) -> Trained[ObjectRef]:
        """Train on all hosts at once and wait for their reports; the uplinks stay where they are."""
        started = []
        for host, clients in self._by_host(sent.downlinks):
            positions, unique = _unique([sent.downlinks[c] for c in clients])
            task = host.train.options(num_returns=2)
            started.append(task.remote(round_number, clients, positions, *unique))
        return _trained(started)

    def open(self, clients: Sequence[int]) -> Trained[ObjectRef]:
        """Have all hosts reply at once."""
        return _trained([host.open.options(num_returns=2).remote(mine) for host, mine in self._by_host(clients)])

    def fuse(self, trained: Trained[ObjectRef]) -> None:
        """Hand the references to the server and wait for it."""
        ray.get(self.server.fuse.remote(*trained.uplinks))

    def join(self, clients: Sequence[int]) -> Sent[ObjectRef]:
        """Have the server store what newcomers are sent."""
        return self.send(clients, new=True)

    def finetune(self, round_number: int, sent: Sent[ObjectRef], epochs: int) -> None:
        """Train newcomers on all hosts at once."""
        started = []
        for host, clients in self._by_host(sent.downlinks):
            positions, unique = _unique([sent.downlinks[c] for c in clients])
            started.append(host.finetune.remote(round_number, epochs, clients, positions, *unique))
        ray.get(started)

    def evaluate(self, judge: Judge, sent: Sent[ObjectRef] | None = None) -> list[EvalRow]:
        """Judge on all hosts at once; rows come in the order of the client ids."""
        handles: Mapping[int, Any] = {}
        if judge.model == "global":
            message = ray.get(self.server.send_global.remote())
            if message is None:
                return []
            handles = dict.fromkeys(judge.clients, message)
        elif judge.phase == "received":
            handles = (self.send(judge.clients) if sent is None else sent).downlinks
        pending = []
        for host, clients in self._by_host(judge.clients):
            positions, unique = _unique([handles[c] for c in clients]) if handles else ([], [])
            pending.append(host.evaluate.remote(judge, clients, positions, *unique))
        rows: list[EvalRow] = [row for part in ray.get(pending) for row in part]
        return sorted(rows, key=lambda row: row.client)

    def downlink(self, handle: ObjectRef) -> Message:
        """Fetch a message."""
        return ray.get(handle)

    def uplinks(self, handle: ObjectRef) -> Sequence[Uplink]:
        """Fetch one host's uplinks."""
        return ray.get(handle)

    def server_numbers(self) -> Tensors:
        """Fetch the rule's own numbers."""
        return ray.get(self.server.numbers.remote())

    def server_state(self) -> object:
        """Fetch the rule's state in plain form."""
        return ray.get(self.server.saved_state.remote())

    def client_states(self) -> Iterator[tuple[int, Tensors]]:
        """Fetch the private states, a few clients at a time, so that memory stays at these."""
        for host, group in zip(self.hosts, self.layout.groups, strict=True):
            for first in range(0, len(group), FETCHED):
                states: dict[int, Tensors] = ray.get(host.private_states.remote(group[first : first + FETCHED]))
                yield from states.items()
                del states  # before the next ones come

    def _by_host(self, clients: Iterable[int]) -> list[tuple[Any, list[int]]]:
        """The hosts that have to do with these clients, each with its own of them."""
        groups: dict[int, list[int]] = {}
        for client in sorted(clients):
            groups.setdefault(self._host_of[client], []).append(client)
        return [(self.hosts[index], mine) for index, mine in groups.items()]


def _trained(started: Sequence[Sequence[ObjectRef]]) -> Trained[ObjectRef]:
    """Wait for the reports of tasks that return (uplinks, reports); the uplinks stay where they are."""
    reports: list[TrainReport] = [r for part in ray.get([report for _, report in started]) for r in part]
    return Trained([uplinks for uplinks, _ in started], tuple(sorted(reports, key=lambda r: r.client)))


def _unique(refs: Sequence[ObjectRef]) -> tuple[list[int], list[ObjectRef]]:
    """Each reference once, and for every entry its position among them; so a shared message is unpacked once a host."""
    order = {ref: at for at, ref in enumerate(dict.fromkeys(refs))}
    return [order[ref] for ref in refs], list(order)
