"""Calls of client actors: started together, repeated after failures, and continued when an actor dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayTaskError

from lightning_modules.hosts.failure_policy import FailurePolicy
from lightning_modules.hosts.failures import Failure
from pflsim.engine.execution import ClientTask, EvalRequest, NodeLost
from pflsim.errors import ClientError
from ray_actors.executor.actor_group import MAX_RECONNECTS, ActorGroup
from ray_actors.executor.deaths import DEATHS, check_lost, how_it_died, wait_for_memory

Groups = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class HostCall:
    """A call of `RemoteHost.run`.

    Args:
        host: the actor's number.
        groups: which clients work, and which of them together.
        task: what they do.
        tries: how often it was repeated.
        before: the failure before it was repeated.
        refs: the returned references, once it has started.
        outcomes: of the clients that succeeded, once it has finished.
    """

    host: int
    groups: tuple[tuple[int, ...], ...]
    task: ClientTask | EvalRequest
    tries: int = 0
    before: Failure | None = None
    refs: tuple[ObjectRef, ...] = ()
    outcomes: Mapping[int, Any] = field(default_factory=dict)

    @property
    def clients(self) -> tuple[int, ...]:
        """All clients in their order."""
        return tuple(client for group in self.groups for client in group)

    def failure(self, reason: str, trace: str = "", **more: Any) -> Failure:
        """Return a failure of the whole call; any of its clients may have caused it."""
        phase, others = self.task.name, self.clients[1:]
        if others:
            shown = ", ".join(map(str, others[:9])) + (", ..." if len(others) > 9 else "")
            phase = f"{phase}, together with clients {shown}"
        error = ClientError(self.clients[0], self.task.round_number, phase, reason, self.clients)
        return Failure(error, self.clients, trace, **more)

    def again(self, groups: Groups, failure: Failure) -> HostCall:
        """Return the call of these groups, to be repeated after a failure."""
        return replace(self, groups=tuple(groups), tries=self.tries + 1, before=failure)

    def divided(self, clients: Sequence[int], failure: Failure) -> list[HostCall]:
        """Return one call for each group of these clients, to be repeated after a failure."""
        return [self.again([group], failure) for group in self.groups if set(group) <= set(clients)]


@dataclass(frozen=True, slots=True)
class HostCalls:
    """Runs calls on the client actors and waits for all of them.

    Args:
        actors: the client actors.
        failure_policy: decides what happens after failures.
        submit: starts the call of an actor for some groups; returns its references, the outcomes first.
        clients_done: called with the number of clients of each finished call.
    """

    actors: ActorGroup
    failure_policy: FailurePolicy
    submit: Callable[[Any, Groups], list[ObjectRef]]
    clients_done: Callable[[int], None]
    _counted: set[ObjectRef] = field(init=False, default_factory=set)
    _reconnects: Counter[int] = field(init=False, default_factory=Counter)

    def run(self, calls: Sequence[HostCall]) -> list[HostCall]:
        """Run the calls, and repeat those that fail if the failure policy asks for it.

        Returns:
            The calls in which at least one client succeeded.

        Raises:
            ClientError: a client failed or an actor died, and the policy is to end the run.
            NodeLost: a node left the cluster, or objects on it are lost.
        """
        pending, finished = [self._start(call) for call in calls], list[HostCall]()
        try:
            while pending:
                repeated, done = self._next(pending)
                pending += [self._start(call) for call in repeated]
                finished += done
        except NodeLost:
            for call in pending:  # so that their actors are free
                with suppress(Exception):
                    ray.cancel(call.refs[0])
            raise
        return finished

    def _start(self, call: HostCall) -> HostCall:
        return replace(call, refs=tuple(self.submit(self.actors.actors[call.host], call.groups)))

    def _next(self, pending: list[HostCall]) -> tuple[list[HostCall], list[HostCall]]:
        """Wait for the first call and remove it; returns the calls to repeat and those with results."""
        try:
            self._wait_for_first(pending)
            outcomes: Mapping[int, Any] = ray.get(pending[0].refs[0])
        except DEATHS as death:
            return self._after_death(pending, death), []
        except ObjectLostError as error:
            check_lost(error)
            raise
        except RayTaskError as error:  # outside of any client's task
            check_lost(error)
            return self._after_error(pending.pop(0), error), []
        call, repeated = pending.pop(0), list[HostCall]()
        succeeded = {client: outcome for client, outcome in outcomes.items() if not isinstance(outcome, Failure)}
        for failure in dict.fromkeys(outcome for outcome in outcomes.values() if isinstance(outcome, Failure)):
            located = replace(failure, where=self.actors.describe(call.host))
            if failure.kind == "device":
                repeated += [*call.divided(self._retry(located, call), failure), *self._replace(call.host, pending)]
            elif clients := self._retry(located, call):
                repeated.append(call.again([clients], failure))
        return repeated, [replace(call, outcomes=succeeded)] if succeeded else []

    def _wait_for_first(self, pending: Sequence[HostCall]) -> None:
        """Wait until the first call is finished; meanwhile report the clients of all calls that finish."""
        clients = {call.refs[0]: len(call.clients) for call in pending if call.refs[0] not in self._counted}
        while clients and pending[0].refs[0] not in self._counted:
            poll_s = self.actors.poll_interval
            ready, _ = ray.wait(list(clients), num_returns=1, timeout=poll_s, fetch_local=False)
            if not ready:
                self.actors.check_nodes()
            for ref in ready:
                self._counted.add(ref)
                self.clients_done(clients.pop(ref))

    def _after_death(self, pending: list[HostCall], death: Exception) -> list[HostCall]:
        """Replace the dead actor; returns what to repeat.

        The actor has died in its first unfinished call; its other calls are lost too. If the policy is to drop a
        client, a call of several groups is divided, so that the next death shows whose it is.
        """
        call, actors = pending.pop(0), self.actors
        if self._reconnects[call.host] < MAX_RECONNECTS and actors.is_back(call.host, death):
            self._reconnects[call.host] += 1
            return [call]
        reason = f"its actor died, {actors.describe(call.host)}: {how_it_died(death)}"
        wait_for_memory(death)
        lost = self._replace(call.host, pending)
        return [*self._divide(call, call.failure(reason, kind="death")), *lost]

    def _replace(self, host: int, pending: list[HostCall]) -> list[HostCall]:
        """Replace an actor; remove its other calls, which are lost, and return them."""
        lost = [call for call in pending if call.host == host]
        pending[:] = [call for call in pending if call.host != host]
        self.actors.replace(host)
        return lost

    def _retry(self, failure: Failure, call: HostCall) -> tuple[int, ...]:
        return self.failure_policy.retry(failure, call.tries, call.before)

    def _after_error(self, call: HostCall, error: RayTaskError) -> list[HostCall]:
        """Return what to repeat of a call that raised an error."""
        self.actors.wait_for(call.host)  # raises if the host could not be built
        cause = error.cause if isinstance(error.cause, BaseException) else error
        where = self.actors.describe(call.host)
        return self._divide(call, call.failure(f"{type(cause).__name__}: {cause}", str(error), where=where))

    def _divide(self, call: HostCall, failure: Failure) -> list[HostCall]:
        if len(call.groups) > 1 and self.failure_policy.divide(failure):
            return call.divided(call.clients, failure)
        return call.divided(self._retry(failure, call), failure)
