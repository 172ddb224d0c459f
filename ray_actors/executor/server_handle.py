"""The driver's hold on the server actor, which is replaced when it dies."""

from __future__ import annotations

import traceback
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayTaskError

from pflsim.config.on_client_error import OnError
from pflsim.errors import ServerError
from pflsim.run_folder.journal import Journal
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.executor.deaths import DEATHS, check_lost, how_it_died, wait_for_memory


class ServerActor:
    """The server, in the state that the last change left; a new actor gets that state.

    Args:
        pool: where the actor comes from.
        parts: rule, federation and threads.
        on_error: how often a dead server is replaced.
        journal: hears of it.
    """

    def __init__(self, pool: ActorPool, parts: tuple[Any, ...], on_error: OnError, journal: Journal):
        self._pool, self._parts, self._journal = pool, parts, journal
        self._tries = on_error.tries_without_drop
        self._actor: Any = pool.server()
        self._state: ObjectRef | None = None
        self._settled: ObjectRef | None = None
        self._where = "not up yet"

    def settle(self) -> None:
        """Have the actor build the server, at its beginning; `wait` waits for it."""
        self._state = None
        self._settled = self._actor.settle.remote(*self._parts)

    def settle_again(self) -> None:
        """The same, in the state that it is known to have: what the actor has done since counts no more."""
        self._settled = self._actor.settle.remote(*self._parts, self._state)

    def wait(self) -> None:
        """Wait until it is up."""
        self.ask()

    def change(self, method: str, *arguments: Any) -> Any:
        """Call what returns something, which is given back, and a new state, which counts when it is there."""
        said, state = self.ask(method, *arguments, returns=2)
        found = ray.get(said)
        self._state = state
        return found

    def ask(self, method: str | None = None, *arguments: Any, returns: int = 1) -> list[ObjectRef]:
        """Call a method and wait until it is through, on a new actor where this one dies; without a method wait until
        the actor is up.

        Returns:
            What it returns, as references.

        Raises:
            ServerError: it raised an error, or died too often.
        """
        for attempt in range(self._tries + 1):
            try:
                self._up()
                if method is None:
                    return []
                called = getattr(self._actor, method).options(num_returns=returns).remote(*arguments)
                refs = [called] if returns == 1 else list(called)
                ray.get(refs[0])
                return refs
            except DEATHS as death:
                what = f"the server actor ({self._where}) died during {method or 'its start'}: {how_it_died(death)}"
                if attempt == self._tries:
                    raise ServerError(f"{what} (tried {attempt + 1} times)") from None
                self._journal.restarted(f"{what}; another one goes on")
                wait_for_memory(death)
                self._actor = self._pool.replace(self._actor)
                self._settled = self._actor.settle.remote(*self._parts, self._state)
            except (RayTaskError, ObjectLostError) as error:
                check_lost(error)
                cause = getattr(error, "cause", None) or error
                what = f"the server ({self._where}) failed in {method or 'its start'}: {type(cause).__name__}: {cause}"
                self._journal.failure(what, str(error) or traceback.format_exc())
                raise ServerError(what) from None
        raise AssertionError("unreachable")

    def go_back(self, state: ObjectRef | None) -> None:
        """To what an earlier change left, for saving it: the actor itself has gone on."""
        self._state = state

    @property
    def state(self) -> ObjectRef | None:
        """What the last change left; None at the beginning."""
        return self._state

    @property
    def actor(self) -> Any:
        """The actor of this moment."""
        return self._actor

    def _up(self) -> None:
        if self._settled is not None:
            pid, node = ray.get(self._settled)
            self._where, self._settled = f"process {pid} on node {node}", None
