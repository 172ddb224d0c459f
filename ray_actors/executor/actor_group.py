"""The client actors of a run: what they are asked to do, and what happens when one of them dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayTaskError

from pflsim.engine.execution import NodeLost
from pflsim.errors import ClientError, RunError
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.executor.deaths import DEATHS, LOOK_S, check_lost, how_it_died, verdict, wait_for_memory
from ray_actors.executor.fingerprint import RuntimeFingerprint, runtime_fingerprint
from ray_actors.hosts.failure_policy import FailurePolicy
from ray_actors.hosts.retries import Failure
from ray_actors.placement.layout import Layout
from ray_actors.placement.nodes import addresses, alive_ids

PROGRESS_TIMEOUT_S = 5.0
"""Seconds in which Ray has told by now whether an actor was up; of one that is dead or has answered it knows at once,
but on a busy machine news may come in another order."""
MOST_BACK = 10
"""So often an actor may be out of reach and back again while one thing is asked of all of them."""
Call = Callable[[Any, Sequence[tuple[int, ...]]], list[ObjectRef]]
"""From a host's actor and the units that shall work there to what the call returns: what is said of every client (a
mapping, with a `Failure` for those that failed), and whatever else there is."""


@dataclass(frozen=True, slots=True)
class Task:
    """A call on a host's actor.

    Args:
        host: its number.
        units: who works, in turn.
        round_number, phase: of the work, for messages.
        tries: how often it was tried again.
        before: why, the last time.
        refs: what it returns, once it has been started.
        good: what is said of the clients that came to something, once it is over.
    """

    host: int
    units: tuple[tuple[int, ...], ...]
    round_number: int
    phase: str
    tries: int = 0
    before: Failure | None = None
    refs: tuple[ObjectRef, ...] = ()
    good: Mapping[int, Any] = field(default_factory=dict)

    @property
    def clients(self) -> tuple[int, ...]:
        """All clients that work, in their order."""
        return tuple(client for unit in self.units for client in unit)


class ActorGroup:
    """Client actors that are replaced when they die.

    Args:
        pool: where they come from.
        layout: which clients live on which of them.
        parts: recipe, data set and partition.
        failure_policy: decides what becomes of failures.
    """

    def __init__(self, pool: ActorPool, layout: Layout, parts: tuple[Any, Any, Any], failure_policy: FailurePolicy):
        self._pool, self._failure_policy = pool, failure_policy
        self._recipe, self._dataset, self._partition = parts
        self._data: tuple[ObjectRef, ObjectRef] | None = None
        self._met: set[RuntimeFingerprint] = set()
        self._move(layout)

    def _move(self, layout: Layout) -> None:
        self._groups, self._nodes = layout.groups, {spec.node for spec in layout.specs if spec.node}
        self._seats = layout.specs
        self._hosts = self._pool.hosts(layout.specs)
        self._settled: list[ObjectRef] = []

    @property
    def actors(self) -> list[Any]:
        """Those of this moment."""
        return list(self._hosts)

    def settle(self) -> None:
        """Have every actor build its host; `wait` waits for them."""
        if self._data is None:
            self._data = ray.put(self._dataset), ray.put(self._partition)
        self._settled = [self._settle(number) for number in range(len(self._hosts))]

    def wait(self) -> None:
        """Wait until all are up.

        Raises:
            RunError: one cannot be built, or runs on other code or other versions than this process.
            Displaced: a node has left meanwhile.
        """
        for number in range(len(self._hosts)):
            self._wait_for(number)
            self._compare(number)

    def move(self, layout: Layout) -> None:
        """Have the clients live elsewhere; actors that are there already build new hosts. See `wait`."""
        self._pool.trim(layout.specs)
        self._move(layout)
        self._data = None  # it may be what was lost
        self.settle()
        self.wait()

    def run(self, tasks: Sequence[Task], call: Call, clients_done: Callable[[int], None] | None = None) -> list[Task]:
        """Have the work done, again where that is the rule.

        Args:
            tasks: what to do.
            call: how it is asked of an actor.
            clients_done: called with the number of clients of every task that is over, as soon as it is.

        Returns:
            The tasks in which somebody's work came to something.

        Raises:
            ClientError: a client failed, or an actor died, and the rule says that this ends the run.
            Displaced: a node has left, or what was on it is missing.
        """
        pending = [self._start(task, call) for task in tasks]
        try:
            return self._run(pending, call, clients_done)
        except NodeLost:
            for task in pending:  # so that the others are free for what comes now
                with suppress(Exception):
                    ray.cancel(task.refs[0])
            raise

    def _run(self, pending: list[Task], call: Call, clients_done: Callable[[int], None] | None) -> list[Task]:
        done: list[Task] = []
        told: set[ObjectRef] = set()
        backs: Counter[int] = Counter()
        while pending:
            try:
                self._await(pending, told, clients_done)
                said: Mapping[int, Any] = ray.get(pending[0].refs[0])
            except DEATHS as death:
                task = pending.pop(0)
                if backs[task.host] < MOST_BACK and self._is_back(task.host, death):
                    backs[task.host] += 1
                    pending.append(self._start(task, call))
                    continue
                mine = [other for other in pending if other.host == task.host]
                pending[:] = [other for other in pending if other.host != task.host]
                again = self._after_death(task, death)
                pending += [self._start(other, call) for other in [*again, *mine]]
                continue
            except ObjectLostError as error:
                check_lost(error)
                raise
            except RayTaskError as error:  # outside of any client's work
                check_lost(error)
                task = pending.pop(0)
                pending += [self._start(other, call) for other in self._after_error(task, error)]
                continue
            task = pending.pop(0)
            good = {client: result for client, result in said.items() if not isinstance(result, Failure)}
            if good:
                done.append(replace(task, good=good))
            for failure in dict.fromkeys(r for r in said.values() if isinstance(r, Failure)):
                placed = replace(failure, where=self._where(task.host))
                rest = self._failure_policy.again(placed, task.tries, task.before)
                if rest:
                    redone = replace(task, units=(rest,), tries=task.tries + 1, before=failure)
                    pending.append(self._start(redone, call))
        return done

    def _await(self, pending: Sequence[Task], told: set[ObjectRef], clients_done: Callable[[int], None] | None) -> None:
        """Wait until the first of the tasks is over, and tell meanwhile of all that are."""
        clients = {task.refs[0]: len(task.clients) for task in pending if task.refs[0] not in told}
        while clients and pending[0].refs[0] not in told:
            found, _ = ray.wait(list(clients), num_returns=1, timeout=self._patience, fetch_local=False)
            if not found:
                self._check_nodes()
            for ref in found:
                done = clients.pop(ref)
                told.add(ref)
                if clients_done is not None:
                    clients_done(done)

    @property
    def _patience(self) -> float | None:
        """How long to wait before looking after the nodes, of which there are none on a machine of one's own."""
        return LOOK_S if self._nodes else None

    def _check_nodes(self) -> None:
        """Raises `Displaced` where a node has left that has client actors: calls to them might never come back."""
        if self._nodes and (gone := self._nodes - alive_ids()):
            names = ", ".join(sorted(addresses(gone)))
            raise NodeLost(f"{len(gone)} of {len(self._nodes)} nodes with client actors left the cluster: {names}")

    def _is_back(self, host: int, death: Exception) -> bool:
        """Whether an actor that could not be reached can be again; raises `Displaced` where its node is gone."""
        if not self._nodes:
            return False
        back = verdict(self._hosts[host], death)
        self._check_nodes()
        return back

    def _start(self, task: Task, call: Call) -> Task:
        return replace(task, refs=tuple(call(self._hosts[task.host], task.units)))

    def _after_death(self, task: Task, death: Exception) -> list[Task]:
        """Replace the actor; returns what of its first unfinished task, in which it died, shall be done again.

        A task of several units is divided, so that next time it is seen which of them it is.
        """
        host, rule = task.host, self._failure_policy.on_error.rule
        what = f"its actor died, {self._where(host)}: {how_it_died(death)}"
        wait_for_memory(death)
        self._replace(host)
        error = ClientError(task.clients[0], task.round_number, _with(task), what, task.clients)
        failure = Failure(error, task.clients, kind="death")
        if len(task.units) > 1 and rule == "drop":
            self._failure_policy.journal.say(f"{error}; tried again one by one")
            rest = task.clients
        else:
            rest = self._failure_policy.again(failure, task.tries, task.before)
        return self._divided(task, rest, failure)

    def _after_error(self, task: Task, error: RayTaskError) -> list[Task]:
        """What of a call that failed as a whole shall be done again, unit by unit."""
        self._wait_for(task.host)  # if it is that the host could not be built, this says so
        cause = error.cause if isinstance(error.cause, BaseException) else error
        what = f"{type(cause).__name__}: {cause}"
        failed = ClientError(task.clients[0], task.round_number, _with(task), what, task.clients)
        failure = Failure(failed, task.clients, str(error), where=self._where(task.host))
        if len(task.units) > 1 and self._failure_policy.on_error.rule == "drop":
            self._failure_policy.journal.failure(f"{failed}; tried again one by one", str(error))
            return self._divided(task, task.clients, failure)
        return self._divided(task, self._failure_policy.again(failure, task.tries, task.before), failure)

    def _divided(self, task: Task, clients: Sequence[int], failure: Failure) -> list[Task]:
        """The units of a task, one by one, of which these clients are all or nothing."""
        units = [unit for unit in task.units if set(unit) <= set(clients)]
        return [replace(task, units=(unit,), tries=task.tries + 1, before=failure) for unit in units]

    def _settle(self, number: int) -> ObjectRef:
        assert self._data is not None
        factory = self._recipe.seated(self._seats[number].gpus)
        return self._hosts[number].settle.remote(factory, *self._data, self._groups[number])

    def _wait_for(self, number: int) -> None:
        """Wait until an actor is up; one that dies before is replaced as often as the rule allows."""
        allowed, attempt, backs = self._failure_policy.on_error.tries_without_drop, 0, 0
        while True:
            try:
                while not ray.wait([self._settled[number]], timeout=self._patience)[0]:
                    self._check_nodes()
                ray.get(self._settled[number])
            except DEATHS as death:
                if backs < MOST_BACK and self._is_back(number, death):
                    backs += 1
                    self._settled[number] = self._settle(number)
                    continue
                what = f"client actor {number} died while it was starting: {how_it_died(death)}"
                if attempt == allowed:
                    raise RunError(f"{what} (tried {attempt + 1} times)") from None
                attempt += 1
                self._failure_policy.journal.say(f"{what}; another is started")
                wait_for_memory(death)
                self._replace(number)
            except RayTaskError as error:
                check_lost(error)
                cause = error.cause if isinstance(error.cause, BaseException) else error
                what = f"client actor {number} cannot start: {type(cause).__name__}: {cause}"
                self._failure_policy.journal.failure(what, str(error))
                raise RunError(what) from None
            else:
                return

    def _compare(self, number: int) -> None:
        """Refuse an actor whose results could not be compared with those of this process."""
        theirs: RuntimeFingerprint = ray.get(self._settled[number])
        mine, known = runtime_fingerprint(), {met.address for met in self._met}
        if (why := theirs.differs(mine)) and self._nodes:
            raise RunError(
                f"client actor {number}, {theirs}, runs on something else than the driver on {mine.address}: {why}; "
                "results would not be comparable, so install the same on every node"
            )
        if theirs.processor != mine.processor and theirs.address not in known:
            self._failure_policy.journal.say(
                f"node {theirs.address} computes with {theirs.processor}, the driver's with {mine.processor}: the last "
                "bits of the results may depend on which clients are where"
            )
        self._met.add(theirs)

    def _replace(self, number: int) -> None:
        """Start another actor in place of a dead one; what it is asked to do waits until it is up."""
        self._failure_policy.journal.restarted()
        self._hosts[number] = self._pool.replace(self._hosts[number])
        self._settled[number] = self._settle(number)

    def _where(self, number: int) -> str:
        """Which actor, for messages."""
        place = "while it was starting"
        with suppress(*DEATHS, RayTaskError):
            if ray.wait([self._settled[number]], timeout=PROGRESS_TIMEOUT_S)[0]:
                place = str(ray.get(self._settled[number]))
        return f"client actor {number}, {place}"


def _with(task: Task) -> str:
    """The phase, with whom else the actor was asked to work for."""
    others = task.clients[1:]
    if not others:
        return task.phase
    shown = ", ".join(map(str, others[:9])) + (", ..." if len(others) > 9 else "")
    return f"{task.phase}, together with clients {shown}"
