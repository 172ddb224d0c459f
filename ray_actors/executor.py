"""The executor on Ray: hosts and server are actors, and messages are passed between them by object reference.

The states of clients and server are objects in Ray's store. The driver holds references to them, and actors get and
return them with each call. So Ray restarts an actor that dies and repeats its calls (`max_restarts`,
`max_task_retries`), with equal results.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import ray
from ray import ObjectRef, exceptions

from lightning_modules.hosts.base_executor import BaseExecutor, PreparedRun
from lightning_modules.hosts.client_factory import InitialStates
from lightning_modules.hosts.failures import Failure
from pflsim.engine.diagnostics import RoundDiagnostics
from pflsim.engine.execution import (
    ClientTask,
    EvalRequest,
    NodeLost,
    Sent,
    StatesLost,
    Trained,
    TrainTask,
    trained_round,
)
from pflsim.errors import ClientError, RunError, ServerError
from pflsim.messages import Message, Uplink
from pflsim.records.checkpoint_write import to_containers
from pflsim.types import EvalRow, Tensors
from ray_actors.client_actor import Environment, Setup, environment
from ray_actors.layout import Layout
from ray_actors.ray_private import logs
from ray_actors.resources import POLL_S, ActorPool, alive_ids
from ray_actors.server_actor import ServerState
from ray_actors.zero_copy import ZeroCopyMessage

logger = logging.getLogger(__name__)
DEATHS = exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError
OBJECTS_PER_FETCH = 10
"""Objects with private states that the driver fetches at a time."""
STATES_BYTES = 2**20
"""Bytes of states that a call returns as one object, if all clients take part; else one would outlive the others."""
StateRef = tuple[ObjectRef, int]
"""An object with a list of states, and the position in it."""
FETCH_TIMEOUT_S = 30.0
"""Seconds after which an object that cannot be fetched counts as lost."""
MAX_CALLS_PER_HOST = 8
"""Calls into which the training of one host is divided at most. If its actor dies, finished calls are not repeated."""


@dataclass(slots=True)
class HostCall:
    """A call of `ClientActor.run`.

    Args:
        host: the actor's number.
        groups: which clients work, and which of them together.
        tries: how often it was repeated after an error.
        before: the failure before it was repeated.
        alone: whether the actor has no other call, so that its death is the fault of these clients.
        refs: the returned references, once it has started.
        outcomes: of the clients that succeeded, once it has finished.
    """

    host: int
    groups: tuple[tuple[int, ...], ...]
    tries: int = 0
    before: Failure | None = None
    alone: bool = False
    refs: Sequence[ObjectRef] = ()
    outcomes: Mapping[int, Any] = field(default_factory=dict)

    @property
    def clients(self) -> tuple[int, ...]:
        """All clients in their order."""
        return tuple(client for group in self.groups for client in group)

    def again(self, clients: Iterable[int], failure: Failure) -> list[HostCall]:
        """Return the call with these clients only, to be repeated after a failure; no call without clients."""
        kept = set(clients)
        groups = tuple(filter(None, (tuple(c for c in group if c in kept) for group in self.groups)))
        return [HostCall(self.host, groups, self.tries + 1, failure)] if groups else []


@dataclass(slots=True)
class RayServer:
    """The server actor, how it builds its host, and the state after the last change."""

    actor: Any
    setup: Setup
    state: ServerState = ServerState(0)


class RayExecutor(BaseExecutor[ObjectRef]):
    """Hosts and server are actors with explicit CPU and GPU requests. A handle is an object reference.

    Args:
        prepared: has what the hosts are built from.
        layout: the clients of each actor, and its resources.
        pool: provides the actors.
    """

    def __init__(self, prepared: PreparedRun, layout: Layout, pool: ActorPool):
        super().__init__(prepared)
        placement, actors = prepared.settings.placement, len(layout.groups)
        self._all_take_part = prepared.settings.fraction == 1 and prepared.settings.participation.cycle == 1
        slots = placement.gpus * placement.actors_per_gpu
        if actors < slots and placement.actors is None:
            logger.info(f"{slots} client actors fit on the GPUs; for more than {actors}, lower lockstep_clients")
        self.layout, self._host_of, self._pool = layout, layout.host_of(), pool
        self.server = RayServer(pool.server(), Setup(tuple(sys.path), (ray.put(self.server_arguments),)))
        self._versions = count(1)
        self.actors = pool.start(layout)
        arguments = tuple(map(ray.put, (self.factory.with_gpus(layout.gpus), *self.data)))
        self._setups = [Setup(tuple(sys.path), arguments, group) for group in layout.groups]
        self._processes: dict[str, str] = {}
        self._ended = set[str]()
        self._nodes: dict[int, str] = {}
        self._due: dict[ObjectRef, int] = {}
        self.states: dict[int, StateRef] = {}
        self._together = 1
        """The number of states in an object."""

    def start(self) -> None:
        """Build the hosts on their actors, and wait until they are ready; the server is built by its first call."""
        self.states = {}
        self.server.state = ServerState(0)
        environments = self._prepare()
        if self._all_take_part:
            self._together = max(1, STATES_BYTES // max(1, environments[0].state_bytes))
        mine = environment()
        gpu = environments[0].processor if self.layout.gpus else mine.processor  # the driver may have none
        for number, theirs in enumerate(environments):
            self._processes[f"client actor {number}"] = theirs.process
            if self._pool.joined and theirs.versions != mine.versions:
                raise RunError(
                    f"client actor {number}, {theirs.process}, runs other software than the driver: {theirs.versions} "
                    f"there, {mine.versions} here; install the same on every node"
                )
        for theirs in {one.processor: one for one in environments if one.processor != gpu}.values():
            logger.warning(
                f"a client actor, {theirs.process}, computes with {theirs.processor}, others with {gpu}: the last bits "
                "of results may depend on which clients are on which node"
            )
        if self._pool.joined:
            self._log_places(environments)

    def _prepare(self) -> list[Environment]:
        """Wait until every actor has built its host.

        Raises:
            RunError: a host cannot be built, or Ray has no room for an actor.
        """
        retries = self.on_error.tries_without_drop
        pairs = zip(self.actors, self._setups, strict=True)
        refs = [actor.prepare.options(max_task_retries=retries).remote(setup) for actor, setup in pairs]
        found: list[Environment] = []
        for number, ref in enumerate(refs):
            try:
                found.append(self._get(ref, placed=True))
            except DEATHS as death:
                why = f"died while it was starting: {how_it_died(death)} (tried {retries + 1} times)"
                raise RunError(f"client actor {number} {why}") from None
            except exceptions.RayTaskError as error:
                cause = error.cause if isinstance(error.cause, BaseException) else error
                why = str(cause).partition("\ntraceback:")[0]  # of an error while Ray reads the arguments
                text = f"client actor {number} cannot start: {type(cause).__name__}: {why}"
                self.failure_policy.log(text, str(error))
                raise RunError(text) from None
        self._nodes = {number: one.node for number, one in enumerate(found)}
        return found

    def _log_places(self, environments: Sequence[Environment]) -> None:
        nodes = Counter(one.process.rpartition(" ")[2] for one in environments)
        places = ", ".join(f"{number} on {node}" for node, number in sorted(nodes.items()))
        logger.info(f"client actors: {places}; driver and server on {ray.util.get_node_ip_address()}")

    def recover(self) -> None:
        """Wait until Ray has restarted the actors of a lost node.

        Raises:
            RunError: the other nodes have no room; `StatesLost` if some states are lost.
        """
        self._log_places(self._prepare())
        try:
            # The locations that Ray reports are not enough: it may give an object up that has another copy.
            for ref in {*(ref for ref, _ in self.states.values()), *self.server.state.ref}:
                ray.get(ref, timeout=FETCH_TIMEOUT_S)
        except (exceptions.ObjectLostError, exceptions.GetTimeoutError):
            raise StatesLost("states were lost with a node") from None

    def send(self, clients: Sequence[int], joining: bool = False) -> Sent[ObjectRef]:
        """Have the server make the downlinks of these clients; the driver gets references and sizes."""
        sent, *refs = self._call_server("send", list(clients), joining, returns=len(clients))
        return Sent({c: refs[at] for c, (at, _) in sent.items()}, {c: size for c, (_, size) in sent.items()})

    def run(self, task: ClientTask, sent: Sent[ObjectRef]) -> Trained[ObjectRef]:
        """Have the clients in `sent` do a task on all hosts at once; uplinks and states stay in Ray's store."""
        calls = self._run(task, sent.downlinks)
        outcomes = {client: found for call in calls for client, found in call.outcomes.items()}
        self.failure_policy.record_kept({client: words for client, (_, words) in outcomes.items() if words})
        states = {
            client: (call.refs[2 + at // self._together], at % self._together)
            for call in calls
            for at, client in enumerate(call.clients)
            if task.changes_state and client in call.outcomes
        }
        reports = tuple(outcomes[client][0] for client in sorted(outcomes))
        return Trained([call.refs[1] for call in calls], reports, states, trained_round(task))

    def _results(self, task: EvalRequest, messages: Mapping[int, ObjectRef | None]) -> dict[int, list[EvalRow]]:
        return {client: rows for call in self._run(task, messages) for client, rows in call.outcomes.items()}

    def _run(self, task: ClientTask | EvalRequest, messages: Mapping[int, ObjectRef | None]) -> list[HostCall]:
        """Run a task on all hosts, training in several calls per host, and repeat calls that fail if the failure
        policy asks for it.

        Returns:
            The calls in which at least one client succeeded.

        Raises:
            ClientError: a client failed or an actor died, and the policy is to end the run.
            NodeLost: a node left the cluster, or objects on it are lost.
        """
        by_host: dict[int, list[tuple[int, ...]]] = {}
        for group in self.factory.task_groups(task, messages):
            by_host.setdefault(self._host_of[group[0]], []).append(group)
        pending: list[HostCall] = []
        for host, some in sorted(by_host.items()):
            size = -(-len(some) // MAX_CALLS_PER_HOST) if isinstance(task, TrainTask) else len(some)
            pending += [HostCall(host, tuple(some[k : k + size])) for k in range(0, len(some), size)]
        for call in pending:
            self._submit(call, task, messages)
        finished, self._due = list[HostCall](), {call.refs[0]: len(call.clients) for call in pending}
        try:
            while pending:
                call = pending.pop(0)
                if call.alone:  # all other calls have finished
                    self._wait_for_restart(call.host)
                    self._submit(call, task, messages)
                repeated = self._finish(call, task)
                for other in repeated:
                    if not other.alone:
                        self._submit(other, task, messages)
                pending = sorted([*pending, *repeated], key=lambda one: one.alone)
                if call.outcomes:
                    finished.append(call)
        except NodeLost:
            for call in pending:  # so that their actors are free
                with suppress(Exception):
                    ray.cancel(call.refs[0])
            raise
        return finished

    def _submit(self, call: HostCall, task: ClientTask | EvalRequest, messages: Mapping[int, ObjectRef | None]) -> None:
        states = {client: self.states[client] for client in call.clients if client in self.states}
        sent = [*(messages[client] for client in call.clients), *(ref for ref, _ in states.values())]
        order = {ref: at for at, ref in enumerate(dict.fromkeys(sent))}  # an actor unpacks each object once
        method = self.actors[call.host].run.options(
            num_returns=2 + task.changes_state * -(-len(call.clients) // self._together),
            max_task_retries=0 if call.alone or self.on_error.rule != "retry" else self.on_error.tries,
        )
        received = {client: order[messages[client]] for client in call.clients}
        places = {client: (order[ref], at) for client, (ref, at) in states.items()}
        call.refs = method.remote(self._setups[call.host], task, call.groups, received, places, self._together, *order)

    def _finish(self, call: HostCall, task: ClientTask | EvalRequest) -> list[HostCall]:
        """Wait for a call and store its outcomes; returns the calls to repeat."""
        try:
            process, outcomes = self._get(call.refs[0], placed=True)
        except DEATHS as death:
            return self._after_death(call, task, death)
        except exceptions.RayTaskError as error:  # outside of any client's task
            cause = error.cause if isinstance(error.cause, BaseException) else error
            failure = self._failure(call, task, f"{type(cause).__name__}: {cause}", trace=str(error))
            if self.on_error.rule == "drop" and len(call.groups) > 1:
                return self._one_by_one(call, failure)
            return call.again(self.failure_policy.retry(failure, call.tries, call.before), failure)
        self._see(f"client actor {call.host}", process)
        repeated = list[HostCall]()
        for failure in dict.fromkeys(outcome for outcome in outcomes.values() if isinstance(outcome, Failure)):
            located = replace(failure, where=f"client actor {call.host}, {process}")
            clients = self.failure_policy.retry(located, call.tries, call.before)
            repeated += call.again(clients, failure)
            if failure.kind == "device":
                self._restart(call.host, process)
        call.outcomes = {client: found for client, found in outcomes.items() if not isinstance(found, Failure)}
        return repeated

    def _after_death(self, call: HostCall, task: ClientTask | EvalRequest, death: Exception) -> list[HostCall]:
        """Return what to repeat of a call whose process died, after Ray's own repetitions.

        Other calls of the actor have failed with it. So its groups run alone, one after another, to find the clients
        that end the process.
        """
        process = self._processes[f"client actor {call.host}"]
        self._wait_for_restart(call.host)
        if self._nodes[call.host] not in alive_ids():
            raise NodeLost(f"the node of client actor {call.host} left the cluster")
        stack = fatal_error(process)
        why = stack.partition("\n")[0] or how_it_died(death)
        reason = f"its actor died, client actor {call.host}, {process}: {why}"
        failure = self._failure(call, task, reason, trace=stack, kind="death")
        if not call.alone and self.on_error.rule != "abort":
            return self._one_by_one(call, failure)
        return call.again(self.failure_policy.retry(failure, self.on_error.tries, None), failure)

    def _one_by_one(self, call: HostCall, failure: Failure) -> list[HostCall]:
        self.failure_policy.log(f"{failure.error}; its clients run one at a time", failure.trace)
        return [HostCall(call.host, (group,), call.tries, failure, alone=True) for group in call.groups]

    def _failure(self, call: HostCall, task: ClientTask | EvalRequest, reason: str, **more: Any) -> Failure:
        """Return a failure of the whole call; any of its clients may have caused it."""
        first, *others = call.clients
        shown = ", ".join(map(str, others[:9])) + (", ..." if len(others) > 9 else "")
        phase = f"{task.name}, together with clients {shown}" if others else task.name
        return Failure(ClientError(first, task.round_number, phase, reason, call.clients), call.clients, **more)

    def _restart(self, host: int, process: str) -> None:
        """Have Ray restart an actor, unless it has restarted since it had this process."""
        if self._processes[f"client actor {host}"] == process:
            ray.kill(self.actors[host], no_restart=False)
            while self._wait_for_restart(host) == process:
                time.sleep(POLL_S)

    def _wait_for_restart(self, host: int) -> str:
        """Wait until an actor runs, and return the name of its process."""
        process = self._get(self.actors[host].ping.remote(), placed=True)
        self._see(f"client actor {host}", process)
        return process

    def _see(self, actor: str, process: str) -> None:
        """Count a restart and log it, if the actor had another process before."""
        before = self._processes.setdefault(actor, process)
        if process != before and process not in self._ended:
            self._processes[actor] = process
            self._ended.add(before)
            logger.warning(f"{actor} died ({before}) and was started again ({process})")
            self.faults.count_restart()

    def _call_server(self, method: str, *arguments: Any, returns: int = 0, **named: Any) -> tuple[Any, ...]:
        """Call a method of the server actor.

        Args:
            method: its name.
            arguments: of the method, in their order.
            returns: how many values it returns besides the first one.
            named: see `ServerActor.call`.

        Returns:
            The first value, and references to the others.

        Raises:
            ServerError: the method raised an error, or the actor died too often.
        """
        server, retries = self.server, self.on_error.tries_without_drop
        call = server.actor.call.options(max_task_retries=retries, num_returns=1 + returns)
        made = call.remote(server.setup, server.state, method, *arguments, **named)
        first, *others = made if returns else [made]
        where = self._processes.get("the server actor", "starting")
        try:
            process, value = self._get(first)
        except DEATHS as death:
            tried = f"(tried {retries + 1} times)"
            text = f"the server actor ({where}) died during {method}: {how_it_died(death)} {tried}"
            raise ServerError(text) from None
        except exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None) or error
            text = f"the server ({where}) failed in {method}: {type(cause).__name__}: {cause}"
            logger.warning(f"{text}\n{str(error).rstrip()}")
            raise ServerError(text) from None
        self._see("the server actor", process)
        return (value, *others)

    def _change_server(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method that changes the server's state; returns its value."""
        version = next(self._versions)
        value, state = self._call_server(method, *arguments, returns=1, version=version, **named)
        self.server.state = ServerState(version, (state,))
        return value

    def _fuse(self, trained: Trained[ObjectRef], matrices: bool) -> RoundDiagnostics:
        return self._change_server("fuse", *trained.uplinks, matrices=matrices, round_number=trained.round_number)

    def _global_message(self) -> ObjectRef | None:
        exists, message = self._call_server("send_global", returns=1)
        return message if exists else None

    def downlink(self, handle: ObjectRef) -> Message:
        """Fetch a downlink."""
        return self._get(handle)

    def uplinks(self, handle: ObjectRef) -> Sequence[Uplink]:
        """Fetch the uplinks of one call."""
        return self._get(handle)

    def server_numbers(self) -> Tensors:
        """Fetch the server rule's own numbers."""
        return self._call_server("numbers")[0]

    def server_state(self) -> object:
        """Fetch the server rule's state as plain containers and tensors."""
        if self.server.state.ref:
            return to_containers(self._get(self.server.state.ref[0]))
        return self._call_server("saved_state")[0]

    def client_states(self) -> Iterator[tuple[int, Tensors]]:
        """Yield every client's id and private state; a few states are in memory at a time."""
        factory, clients = self.factory, sorted(self._host_of)
        variants = {factory.variant_of(client) for client in clients if client not in self.states}
        initial = InitialStates(factory, {variant: factory.build(variant) for variant in variants})
        stored = self._fetched(self.states)
        yield from (next(stored) if client in self.states else (client, initial[client]) for client in clients)

    def _fetched(self, states: Mapping[int, StateRef]) -> Iterator[tuple[int, Tensors]]:
        clients, size = sorted(states), OBJECTS_PER_FETCH * self._together
        for first in range(0, len(clients), size):
            some = {client: states[client] for client in clients[first : first + size]}
            refs = [*dict.fromkeys(ref for ref, _ in some.values())]
            found = dict(zip(refs, self._fetch(refs), strict=True))
            yield from ((client, found[ref][at]) for client, (ref, at) in some.items())

    def restore(self, server: object, clients: Iterable[tuple[int, Tensors]]) -> None:
        """Load the states of a checkpoint."""
        self._change_server("restore", ray.put(ZeroCopyMessage(server)))
        self.states = {client: (ray.put(ZeroCopyMessage([state])), 0) for client, state in clients}

    def _get(self, ref: ObjectRef, placed: bool = False) -> Any:
        """Wait for an object and return it; meanwhile, report the clients whose calls finish.

        Args:
            ref: of the object.
            placed: whether it comes from a client actor, which may have no room after its node was lost.

        Raises:
            RunError: Ray has ended, or there is no room for client actors; `NodeLost`: see `_fetch`.
        """
        while True:
            self._pool.check() if placed else self._pool.check_ray()
            waiting = dict.fromkeys([ref, *(self._due if placed else ())])
            ready, _ = ray.wait(list(waiting), timeout=POLL_S, fetch_local=False)
            for found in ready:
                if found in self._due:
                    self.clients_done(self._due.pop(found))
            if ref in ready:
                return self._fetch(ref)

    def _fetch(self, refs: Any) -> Any:
        """Call `ray.get`; raises `NodeLost` if an object, or an argument of its call, is lost with its node."""
        self._pool.check_ray()
        try:
            return ray.get(refs)
        except (exceptions.RayTaskError, exceptions.ObjectLostError) as error:
            cause = error.cause if isinstance(error, exceptions.RayTaskError) else error
            if isinstance(cause, exceptions.ObjectLostError):
                raise NodeLost("objects on a node that left the cluster are lost") from None
            raise


def fatal_error(process: str) -> str:
    """Return the fatal error and the stack that a process on this machine has logged; "" if there is none.

    Args:
        process: its name, see `process_name`.
    """
    _, pid, *_, address = process.split()
    found = logs().glob(f"worker-*-{pid}.err") if address == ray.util.get_node_ip_address() else ()
    return "".join(log.read_text(errors="replace").partition("Fatal Python error: ")[2] for log in found)


def how_it_died(error: Exception) -> str:
    """Return why an actor died, in one line without Ray's advice."""
    text = " ".join(str(error).split())
    if "running low on memory" in text.partition("Some common")[0]:
        return "Ray killed it because the node was out of memory"
    if any(words in text for words in ("Socket closed", "restart", "connection error code 2", "unavailable")):
        return "its process was killed (kill -9, or by the operating system because memory ran out)"
    return text[:300]
