"""The client actors of a run: built, watched, and replaced when they die."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayTaskError

from lightning_modules.hosts.failure_policy import FailurePolicy
from pflsim.engine.execution import NodeLost
from pflsim.errors import RunError
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.executor.deaths import DEATHS, POLL_INTERVAL_S, check_lost, how_it_died, is_alive, wait_for_memory
from ray_actors.executor.fingerprint import RuntimeFingerprint, runtime_fingerprint
from ray_actors.placement.layout import Layout
from ray_actors.placement.nodes import addresses, alive_ids

logger = logging.getLogger(__name__)
DESCRIBE_TIMEOUT_S = 5.0
"""How long to wait for an actor's fingerprint in an error message. It is known, but may arrive late on a busy node."""
MAX_RECONNECTS = 10
"""How often an actor may become unreachable and return during one operation."""


class ActorGroup:
    """Client actors that are replaced when they die.

    Args:
        pool: provides the actors.
        layout: the clients and resources of each actor.
        arguments: client factory, data set and partition.
        failure_policy: how often an actor that dies is replaced.

    Attributes:
        actors: the current actors.
    """

    def __init__(self, pool: ActorPool, layout: Layout, arguments: tuple[Any, Any, Any], failure_policy: FailurePolicy):
        self._pool, self._failure_policy = pool, failure_policy
        self._factory, self._dataset, self._partition = arguments
        self._data: tuple[ObjectRef, ObjectRef] | None = None
        self._compared: set[RuntimeFingerprint] = set()
        self._place(layout)

    def _place(self, layout: Layout) -> None:
        self._layout, self._nodes = layout, {spec.node for spec in layout.specs if spec.node}
        self.actors: list[Any] = self._pool.hosts(layout.specs)
        self._built: list[ObjectRef] = []

    def start(self) -> None:
        """Have every actor build its host, without waiting for it."""
        if self._data is None:
            self._data = ray.put(self._dataset), ray.put(self._partition)
        self._built = [self._build(number) for number in range(len(self.actors))]

    def wait_until_ready(self) -> None:
        """Wait until every actor has built its host.

        Raises:
            RunError: a host cannot be built, or an actor runs other code or versions than this process.
            NodeLost: a node left the cluster.
        """
        for number in range(len(self.actors)):
            self.wait_for(number)
            self._compare(number)

    def move(self, layout: Layout) -> None:
        """Change the layout: end actors that are not needed, and build new hosts. Raises as `wait_until_ready`."""
        self._pool.trim(layout.specs)
        self._place(layout)
        self._data = None  # a lost node may have had it
        self.start()
        self.wait_until_ready()

    def wait_for(self, number: int) -> None:
        """Wait until an actor has built its host; one that dies is replaced as often as the failure policy allows."""
        tries, attempt, reconnects = self._failure_policy.on_error.tries_without_drop, 0, 0
        while True:
            try:
                while not ray.wait([self._built[number]], timeout=self.poll_interval)[0]:
                    self.check_nodes()
                ray.get(self._built[number])
                return
            except DEATHS as death:
                if reconnects < MAX_RECONNECTS and self.is_back(number, death):
                    reconnects += 1
                    self._built[number] = self._build(number)
                    continue
                text = f"client actor {number} died while it was starting: {how_it_died(death)}"
                if attempt == tries:
                    raise RunError(f"{text} (tried {attempt + 1} times)") from None
                attempt += 1
                logger.warning(f"{text}; another one is started")
                wait_for_memory(death)
                self.replace(number)
            except RayTaskError as error:
                check_lost(error)
                cause = error.cause if isinstance(error.cause, BaseException) else error
                text = f"client actor {number} cannot start: {type(cause).__name__}: {cause}"
                self._failure_policy.log(text, str(error))
                raise RunError(text) from None

    def replace(self, number: int) -> None:
        """Start another actor in place of a dead one; its calls wait until it has built its host."""
        self._failure_policy.faults.count_restart()
        self.actors[number] = self._pool.replace(self.actors[number])
        self._built[number] = self._build(number)

    @property
    def poll_interval(self) -> float | None:
        """Seconds between two checks of the nodes; None on a single machine, where none can leave."""
        return POLL_INTERVAL_S if self._nodes else None

    def check_nodes(self) -> None:
        """Raise `NodeLost` if a node with client actors left the cluster: calls to them might never return."""
        if self._nodes and (gone := self._nodes - alive_ids()):
            names = ", ".join(sorted(addresses(gone)))
            raise NodeLost(f"{len(gone)} of {len(self._nodes)} nodes with client actors left the cluster: {names}")

    def is_back(self, number: int, death: Exception) -> bool:
        """Return whether an actor that was unreachable is alive; raises `NodeLost` if its node left the cluster."""
        if not self._nodes:
            return False
        alive = is_alive(self.actors[number], death)
        self.check_nodes()
        return alive

    def describe(self, number: int) -> str:
        """Return an actor's number, process and node, for messages."""
        place = "while it was starting"
        with suppress(*DEATHS, RayTaskError):
            if ray.wait([self._built[number]], timeout=DESCRIBE_TIMEOUT_S)[0]:
                place = str(ray.get(self._built[number]))
        return f"client actor {number}, {place}"

    def _build(self, number: int) -> ObjectRef:
        assert self._data is not None
        factory = self._factory.with_gpus(self._layout.specs[number].gpus)
        self.actors[number].extend_path.remote(sys.path)
        return self.actors[number].build.remote(factory, *self._data, self._layout.groups[number])

    def _compare(self, number: int) -> None:
        """Raise a `RunError` if an actor's results would not be comparable with those of this process."""
        theirs: RuntimeFingerprint = ray.get(self._built[number])
        mine, known = runtime_fingerprint(), {other.address for other in self._compared}
        if (why := theirs.differs(mine)) and self._nodes:
            where = f"client actor {number}, {theirs}, runs other software than the driver on {mine.address}"
            raise RunError(f"{where}: {why}; install the same on every node")
        if theirs.processor != mine.processor and theirs.address not in known:
            logger.warning(
                f"node {theirs.address} computes with {theirs.processor}, the driver's with {mine.processor}: the last "
                "bits of the results may depend on which clients are on which node"
            )
        gpus = {other.gpu for other in self._compared if other.gpu}
        if theirs.gpu and gpus and theirs.gpu not in gpus:
            logger.warning(
                f"client actor {number} computes on {theirs.gpu}, others on {', '.join(sorted(gpus))}: the last bits "
                "of the results may depend on which clients are on which GPU"
            )
        self._compared.add(theirs)
