"""The executor on Ray: hosts and server are actors, and messages are passed between them by object reference.

The states of clients and server are objects in Ray's store. The driver holds references to them, and actors get and
return them with each call, so that no state is lost if a process dies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError, RayTaskError

from lightning_modules.hosts.base_executor import BaseExecutor
from lightning_modules.hosts.client_factory import ClientFactory, InitialStates
from pflsim.config.settings import OnError
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.engine.diagnostics import RoundDiagnostics
from pflsim.engine.execution import ClientTask, EvalRequest, NodeLost, Sent, Trained, TrainTask
from pflsim.errors import SettingsError
from pflsim.messages import Message, Uplink
from pflsim.records.checkpoint.state import plain
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import EvalRow, Tensors, TrainReport
from ray_actors.executor.actor_group import ActorGroup
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.executor.deaths import check_lost
from ray_actors.executor.host_calls import Groups, HostCall, HostCalls
from ray_actors.executor.server_handle import ServerActor
from ray_actors.executor.zero_copy import ZeroCopyMessage
from ray_actors.placement.elastic import ElasticLayout
from ray_actors.placement.layout import Layout
from ray_actors.placement.nodes import whereabouts

logger = logging.getLogger(__name__)
CLIENTS_PER_FETCH = 10
"""Clients whose private states the driver fetches at a time."""
FETCH_TIMEOUT_S = 30.0
"""Seconds after which an object that cannot be fetched counts as lost."""
MAX_CALLS_PER_HOST = 8
"""Calls into which the training of one host is divided at most. If its actor dies, only the last one is repeated."""


class RayExecutor(BaseExecutor[ObjectRef]):
    """Hosts and server are actors with explicit CPU and GPU requests. A handle is an object reference.

    Args:
        factory, dataset, partition: see `ClientHost`.
        rule, federation: see `ServerHost`.
        layout: the clients and resources of each actor.
        pool: provides the actors.
        on_error: the setting on_client_error.
        elastic: computes a new layout when nodes join or leave; None on a single machine.
        server_device: see `ServerHost`.
    """

    def __init__(
        self,
        factory: ClientFactory,
        dataset: Dataset,
        partition: Partition,
        rule: ServerRule[Any],
        federation: Federation,
        layout: Layout,
        pool: ActorPool,
        on_error: OnError | None = None,
        elastic: ElasticLayout | None = None,
        server_device: str = "cpu",
    ):
        on_error = on_error or OnError("retry", 3)
        super().__init__(factory, on_error)
        self.layout, self._host_of, self._elastic = layout, layout.host_of(), elastic
        self.server = ServerActor(pool, (rule, federation, factory.threads, server_device), on_error, self.faults)
        self.actor_group = ActorGroup(pool, layout, (factory, dataset, partition), self.failure_policy)
        self.states: dict[int, ObjectRef] = {}

    def start(self) -> None:
        """Build the server and the hosts on their actors, and wait until they are ready."""
        self.states = {}
        self.server.start()
        self.actor_group.start()
        self.server.call()
        self.actor_group.wait_until_ready()
        if self._elastic is not None:
            logger.info(whereabouts(self.layout.specs))

    def refresh(self) -> None:
        """Use nodes that have joined, if the settings ask for it."""
        layout = self._elastic.grown(self.layout) if self._elastic is not None else None
        if layout is not None:
            self._move(layout)
            logger.info(f"nodes have joined; {whereabouts(layout.specs)}")

    def recover(self) -> bool:
        """Continue on the remaining nodes; returns whether all states are intact."""
        if self._elastic is not None:
            self._move(self._elastic.lay_out())
            logger.info(whereabouts(self.layout.specs))
        if self._states_exist():
            self.server.reset()
            return True
        self.states = {}
        self.server.start()
        return False

    def _move(self, layout: Layout) -> None:
        self.layout, self._host_of = layout, layout.host_of()
        try:
            self.actor_group.move(layout)
        except SettingsError as error:  # another program has taken the resources
            raise NodeLost(f"the cluster has no room for the clients: {error}") from None

    def _states_exist(self) -> bool:
        """Return whether every state can be fetched.

        The locations that Ray reports are not enough: if a node dies, Ray may give an object up that has another copy.
        """
        try:
            for ref in [*self.states.values(), *([] if self.server.state is None else [self.server.state])]:
                ray.get(ref, timeout=FETCH_TIMEOUT_S)
        except (ObjectLostError, GetTimeoutError):
            return False
        return True

    def send(self, clients: Sequence[int], joining: bool = False) -> Sent[ObjectRef]:
        """Have the server make the downlinks of these clients; the driver gets references and sizes."""
        sent, *refs = self.server.call("send", list(clients), joining, returns=1 + len(clients))
        found = _get(sent)
        return Sent({c: refs[at] for c, (at, _) in found.items()}, {c: size for c, (_, size) in found.items()})

    def run(self, task: ClientTask, sent: Sent[ObjectRef]) -> Trained[ObjectRef]:
        """Have the clients in `sent` do a task on all hosts at once; uplinks and states stay in Ray's store."""
        calls = self._run(task, sent.downlinks)
        outcomes: dict[int, tuple[TrainReport, str]] = {}
        for call in calls:
            outcomes.update(call.outcomes)
        self.failure_policy.record_kept({client: words for client, (_, words) in outcomes.items() if words})
        states = {
            client: ref
            for call in calls
            for client, ref in zip(call.clients, call.refs[2:], strict=task.changes_state)
            if client in call.outcomes
        }
        reports = tuple(outcomes[client][0] for client in sorted(outcomes))
        return Trained([call.refs[1] for call in calls], reports, states)

    def _evaluate(self, request: EvalRequest, messages: Mapping[int, ObjectRef | None]) -> dict[int, list[EvalRow]]:
        return {client: rows for call in self._run(request, messages) for client, rows in call.outcomes.items()}

    def _run(self, task: ClientTask | EvalRequest, messages: Mapping[int, ObjectRef | None]) -> list[HostCall]:
        """Run a task on all hosts, training in several calls per host; returns the finished calls."""

        def submit(actor: Any, groups: Groups) -> list[ObjectRef]:
            clients = [client for group in groups for client in group]
            unique = dict.fromkeys(messages[client] for client in clients)  # a host unpacks each message once
            order = {ref: at for at, ref in enumerate(unique)}
            positions = [order[messages[client]] for client in clients]
            states = [self.states.get(client) for client in clients]
            returns = 2 + task.changes_state * len(clients)
            return actor.run.options(num_returns=returns).remote(task, groups, positions, *unique, *states)

        by_host: dict[int, list[tuple[int, ...]]] = {}
        for group in self.factory.task_groups(task, messages):
            by_host.setdefault(self._host_of[group[0]], []).append(group)
        calls: list[HostCall] = []
        for host, some in sorted(by_host.items()):
            size = -(-len(some) // MAX_CALLS_PER_HOST) if isinstance(task, TrainTask) else len(some)
            calls += [HostCall(host, tuple(some[k : k + size]), task) for k in range(0, len(some), size)]
        return HostCalls(self.actor_group, self.failure_policy, submit, self.clients_done).run(calls)

    def _fuse(self, trained: Trained[ObjectRef], matrices: bool) -> RoundDiagnostics:
        return self.server.change("fuse", matrices, *trained.uplinks)

    def _global_message(self) -> ObjectRef | None:
        exists, message = self.server.call("send_global", returns=2)
        return message if _get(exists) else None

    def downlink(self, handle: ObjectRef) -> Message:
        """Fetch a downlink."""
        return _get(handle)

    def uplinks(self, handle: ObjectRef) -> Sequence[Uplink]:
        """Fetch the uplinks of one call."""
        return _get(handle)

    def server_numbers(self) -> Tensors:
        """Fetch the server rule's own numbers."""
        return _get(self.server.call("numbers")[0])

    def server_state(self) -> object:
        """Fetch the server rule's state as plain containers and tensors."""
        state = self.server.state
        return _get(self.server.call("saved_state")[0]) if state is None else plain(_get(state))

    def client_states(self) -> Iterator[tuple[int, Tensors]]:
        """Yield every client's id and private state; a few states are in memory at a time."""
        factory, clients = self.factory, sorted(self._host_of)
        variants = {factory.variant_of(client) for client in clients if client not in self.states}
        initial = InitialStates(factory, {variant: factory.build(variant) for variant in variants})
        stored = self._fetched(self.states)
        yield from (next(stored) if client in self.states else (client, initial[client]) for client in clients)

    def _fetched(self, states: Mapping[int, ObjectRef]) -> Iterator[tuple[int, Tensors]]:
        clients = sorted(states)
        for first in range(0, len(clients), CLIENTS_PER_FETCH):
            some = clients[first : first + CLIENTS_PER_FETCH]
            yield from zip(some, _get([states[client] for client in some]), strict=True)

    def restore(self, server: object, clients: Iterable[tuple[int, Tensors]]) -> None:
        """Load the states of a checkpoint."""
        self.server.change("restore", ray.put(ZeroCopyMessage(server)))
        self.states = {client: ray.put(ZeroCopyMessage(state)) for client, state in clients}


def _get(refs: Any) -> Any:
    """Call `ray.get`; raises `NodeLost` if an object is lost with its node."""
    try:
        return ray.get(refs)
    except (RayTaskError, ObjectLostError) as error:
        check_lost(error)
        raise
