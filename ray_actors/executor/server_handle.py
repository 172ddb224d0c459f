"""The driver's handle of the server actor, which is replaced if it dies."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayTaskError

from pflsim.config.settings import OnError
from pflsim.engine.faults import FaultRecorder
from pflsim.errors import ServerError
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.executor.deaths import DEATHS, check_lost, how_it_died, wait_for_memory

logger = logging.getLogger(__name__)


class ServerActor:
    """The server actor. If it dies, a new one continues from `state`.

    Args:
        pool: provides the actor.
        arguments: rule, federation, number of threads and device.
        on_error: how often a dead server is replaced.
        faults: counts the replaced actors.

    Attributes:
        actor: the current actor.
        state: the state after the last change; None: the initial one.
    """

    def __init__(self, pool: ActorPool, arguments: tuple[Any, ...], on_error: OnError, faults: FaultRecorder):
        self._pool, self._arguments, self._faults = pool, arguments, faults
        self._max_tries = on_error.tries_without_drop
        self.actor: Any = pool.server()
        self.state: ObjectRef | None = None
        self._built: ObjectRef | None = None
        self._where = "starting"

    def start(self) -> None:
        """Have the actor build the server in the initial state, without waiting for it."""
        self.state = None
        self.reset()

    def reset(self) -> None:
        """Have the actor build the server in the state `state`, without waiting for it."""
        self.actor.extend_path.remote(sys.path)
        self._built = self.actor.build.remote(*self._arguments, self.state)

    def change(self, method: str, *arguments: Any) -> Any:
        """Call a method that returns a value and a new state; store the state and return the value."""
        value, state = self.call(method, *arguments, returns=2)
        found = ray.get(value)
        self.state = state
        return found

    def call(self, method: str | None = None, *arguments: Any, returns: int = 1) -> list[ObjectRef]:
        """Call a method and wait for its end; if the actor dies, repeat the call on a new one.

        Args:
            method: its name; None: only wait until the server is built.
            arguments: of the method.
            returns: how many values it returns.

        Returns:
            References to the values.

        Raises:
            ServerError: the method raised an error, or the actor died too often.
        """
        for attempt in range(self._max_tries + 1):
            try:
                if self._built is not None:
                    pid, node = ray.get(self._built)
                    self._where, self._built = f"process {pid} on node {node}", None
                if method is None:
                    return []
                made = getattr(self.actor, method).options(num_returns=returns).remote(*arguments)
                refs = [made] if returns == 1 else list(made)
                ray.get(refs[0])
                return refs
            except DEATHS as death:
                text = f"the server actor ({self._where}) died during {method or 'its start'}: {how_it_died(death)}"
                if attempt == self._max_tries:
                    raise ServerError(f"{text} (tried {attempt + 1} times)") from None
                logger.warning(f"{text}; another one is started")
                self._faults.count_restart()
                wait_for_memory(death)
                self.actor = self._pool.replace(self.actor)
                self.reset()
            except (RayTaskError, ObjectLostError) as error:
                check_lost(error)
                cause = getattr(error, "cause", None) or error
                text = f"the server ({self._where}) failed in {method or 'its start'}: {type(cause).__name__}: {cause}"
                logger.warning(f"{text}\n{(str(error) or traceback.format_exc()).rstrip()}")
                raise ServerError(text) from None
        raise AssertionError("unreachable")
