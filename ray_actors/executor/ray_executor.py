"""The executor on Ray: client hosts and the server are actors, and messages go between them by object reference.

The states of the clients and of the server are objects in Ray's store, which the driver holds references to. Actors get
them with every call and give new ones back, so that a process that dies takes nothing with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, ObjectLostError, RayTaskError
from ray.experimental import get_object_locations

from pflsim.config.on_client_error import OnError
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.engine.diagnostics import RoundDiagnostics
from pflsim.engine.execution import EvalRequest, NodeLost, Sent, Trained
from pflsim.errors import SettingsError
from pflsim.messages import Message, Uplink
from pflsim.run_folder.checkpoint import plain
from pflsim.run_folder.journal import Journal
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import EvalRow, Tensors, TrainReport
from ray_actors.executor.actor_group import ActorGroup, Task
from ray_actors.executor.actor_pool import ActorPool
from ray_actors.executor.deaths import check_lost
from ray_actors.executor.server_handle import ServerActor
from ray_actors.executor.zero_copy import ZeroCopyMessage
from ray_actors.hosts.client_factory import ClientFactory, InitialStates
from ray_actors.hosts.failure_policy import FailurePolicy
from ray_actors.placement.elastic import ElasticLayout
from ray_actors.placement.layout import Layout
from ray_actors.placement.nodes import alive_ids, whereabouts

FETCHED = 10
"""Clients whose private states the driver fetches at a time."""
SMALL = 100 * 1024
"""Bytes up to which Ray may have an object in the driver's process instead of on a node."""
FOUND_S = 30.0
"""Seconds in which an object is brought, or is known to be lost."""
COMPONENTS = 8
"""Calls into which the training of one host is divided, at most: what a dead actor has to do again is the last part."""

Units = Sequence[tuple[int, ...]]


class RayExecutor:
    """Hosts as actors with explicit CPU and GPU requests; a handle is an object reference.

    Args:
        recipe, dataset, partition: for the hosts.
        rule, federation: for the server.
        layout: which clients live on which actor, and what an actor asks for.
        pool: where the actors come from.
        on_error: what becomes of clients that fail, and of actors that die.
        journal: hears of them.
        elastic: how the layout comes to be on nodes that come and go; None: there is one machine.
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
        journal: Journal | None = None,
        elastic: ElasticLayout | None = None,
    ):
        self.factory, self.layout, self._host_of = factory, layout, layout.host_of()
        self._ground = elastic
        self.journal = journal or Journal()
        on_error = on_error or OnError("retry", 3)
        self.failure_policy = FailurePolicy(on_error, factory.on_nonfinite, self.journal)
        self.server = ServerActor(pool, (rule, federation, factory.threads), on_error, self.journal)
        self.actor_group = ActorGroup(pool, layout, (factory, dataset, partition), self.failure_policy)
        self.states: dict[int, ObjectRef] = {}
        self._before: tuple[ObjectRef | None, dict[int, ObjectRef]] | None = None
        self.clients_done: Callable[[int], None] = lambda done: None

    def start(self) -> None:
        """Settle the actors and wait until all of them are up."""
        self.states = {}
        self.server.settle()
        self.actor_group.settle()
        self.server.wait()
        self.actor_group.wait()

    def whereabouts(self) -> str:
        """How many client actors there are on which node, and which has the server."""
        return whereabouts(self.layout.specs)

    def refresh(self) -> None:
        """Lay the clients out anew where nodes have joined and that is asked for."""
        layout = self._ground.grown(self.layout) if self._ground is not None else None
        if layout is not None:
            self._move(layout)
            self.journal.note(f"nodes have joined; {self.whereabouts()}")

    def recover(self) -> bool:
        """Lay the clients out anew on the nodes that are left, and see which states are."""
        if self._ground is not None:
            self._move(self._ground.lay_out())
            self.journal.note(self.whereabouts())
        if self._are_there():
            self.server.settle_again()
            return True
        self.states = {}
        self.server.settle()
        return False

    def _move(self, layout: Layout) -> None:
        self.layout, self._host_of = layout, layout.host_of()
        try:
            self.actor_group.move(layout)
        except SettingsError as error:  # others were faster
            raise NodeLost(f"the clients have no place: {error}") from None

    def _are_there(self) -> bool:
        """Whether all states are: those with a copy on a node that is alive, and small ones, which the driver has."""
        held = [*self.states.values(), *([] if self.server.state is None else [self.server.state])]
        places, alive = get_object_locations(held) if held else {}, alive_ids()
        for ref in held:
            place = places.get(ref, {})
            if alive.isdisjoint(place.get("node_ids", ())):
                if (place.get("object_size") or 0) > SMALL:
                    return False
                try:
                    ray.get(ref, timeout=FOUND_S)
                except (ObjectLostError, GetTimeoutError):
                    return False
        return True

    def send(self, clients: Sequence[int]) -> Sent[ObjectRef]:
        """Have the server make the messages; the driver gets references and sizes."""
        return self._sent(clients)

    def join(self, clients: Sequence[int]) -> Sent[ObjectRef]:
        """Have the server make what newcomers are sent."""
        return self._sent(clients, new=True)

    def _sent(self, clients: Sequence[int], new: bool = False) -> Sent[ObjectRef]:
        sent, *refs = self.server.ask("send", list(clients), new, returns=1 + len(clients))
        with _known():
            found = ray.get(sent)
        return Sent({c: refs[at] for c, (at, _) in found.items()}, {c: size for c, (_, size) in found.items()})

    def train(
        self, round_number: int, sent: Sent[ObjectRef], work: Mapping[int, float] | None = None
    ) -> Trained[ObjectRef]:
        """Train on all hosts at once and wait for their reports; uplinks and states stay where they are."""
        work = dict(work or {})

        def call(host: Any, units: Units) -> list[ObjectRef]:
            positions, brought = self._brought(units, sent.downlinks)
            made = host.train.options(num_returns=2 + len(positions))
            return made.remote(units, positions, round_number, work, *brought)

        done = self.actor_group.run(
            self._tasks(self.factory.units(sent.downlinks), round_number, "local training", COMPONENTS),
            call,
            self.clients_done,
        )
        return self._trained(done)

    def open(self, clients: Sequence[int]) -> Trained[ObjectRef]:
        """Have all hosts reply at once."""

        def call(host: Any, units: Units) -> list[ObjectRef]:
            _, brought = self._brought(units)
            return host.open.options(num_returns=2).remote(units, [], *brought)

        return self._trained(
            self.actor_group.run(self._tasks(_alone(clients), 0, "initial round"), call, self.clients_done)
        )

    def fuse(self, trained: Trained[ObjectRef], matrices: bool = False) -> RoundDiagnostics:
        """Hand the references to the server and wait for it."""
        before = self.server.state, self.states
        seen = self.server.change("fuse", matrices, *trained.uplinks)
        self._before = before
        self.states = {**self.states, **trained.states}  # type: ignore[dict-item]
        return seen

    def finetune(self, round_number: int, sent: Sent[ObjectRef], epochs: int) -> None:
        """Train newcomers on all hosts at once."""

        def call(host: Any, units: Units) -> list[ObjectRef]:
            positions, brought = self._brought(units, sent.downlinks)
            made = host.finetune.options(num_returns=1 + len(positions))
            return made.remote(units, positions, round_number, epochs, *brought)

        done = self.actor_group.run(self._tasks(_alone(sent.downlinks), round_number, "fine-tuning"), call)
        self._before = self.server.state, self.states
        new = {c: ref for task in done for c, ref in zip(task.clients, task.refs[1:], strict=True) if c in task.good}
        self.states = {**self.states, **new}

    def go_back(self) -> None:
        """The states before the last fusion, or fine-tuning."""
        if self._before is not None:
            state, self.states = self._before
            self.server.go_back(state)
            self._before = None

    def confirm(self) -> None:
        """What was before may go."""
        self._before = None

    def evaluate(self, request: EvalRequest, sent: Sent[ObjectRef] | None = None) -> list[EvalRow]:
        """Judge on all hosts at once; rows come in the order of the client ids."""
        handles: Mapping[int, ObjectRef] = {}
        if request.model == "global":
            offered, message = self.server.ask("send_global", returns=2)
            with _known():
                if not ray.get(offered):
                    return []
            handles = dict.fromkeys(request.clients, message)
        elif request.phase == "received":
            handles = (self.send(request.clients) if sent is None else sent).downlinks

        def call(host: Any, units: Units) -> list[ObjectRef]:
            positions, brought = self._brought(units, handles)
            return [host.evaluate.remote(units, positions, request, *brought)]

        done = self.actor_group.run(
            self._tasks(_alone(request.clients), request.round_number, "evaluation"), call, self.clients_done
        )
        found: dict[int, list[EvalRow]] = {client: rows for task in done for client, rows in task.good.items()}
        return [row for client in sorted(found) for row in found[client]]

    def downlink(self, handle: ObjectRef) -> Message:
        """Fetch a message."""
        with _known():
            return ray.get(handle)

    def uplinks(self, handle: ObjectRef) -> Sequence[Uplink]:
        """Fetch the uplinks of one call."""
        with _known():
            return ray.get(handle)

    def server_numbers(self) -> Tensors:
        """Fetch the rule's own numbers."""
        with _known():
            return ray.get(self.server.ask("numbers")[0])

    def server_state(self) -> object:
        """Fetch the rule's state in plain form."""
        held = self.server.state
        with _known():
            return ray.get(self.server.ask("saved_state")[0]) if held is None else plain(ray.get(held))

    def client_states(self) -> Iterator[tuple[int, Tensors]]:
        """The private states, a few clients fetched at a time, so that memory stays at these."""
        factory, everyone = self.factory, sorted(self._host_of)
        untouched = [client for client in everyone if client not in self.states]
        variants = {factory.variant_of(client) for client in untouched}
        initial = InitialStates(factory, {variant: factory.build(variant) for variant in variants})
        for first in range(0, len(everyone), FETCHED):
            some = everyone[first : first + FETCHED]
            held = [client for client in some if client in self.states]
            with _known():
                fetched = dict(zip(held, ray.get([self.states[client] for client in held]), strict=True))
            yield from ((client, fetched[client] if client in fetched else initial[client]) for client in some)

    def restore(self, server: object, clients: Iterable[tuple[int, Tensors]]) -> None:
        """Take over saved states."""
        self.server.change("restore", ray.put(ZeroCopyMessage(server)))
        self.states = {client: ray.put(ZeroCopyMessage(state)) for client, state in clients}

    def _tasks(self, units: Units, round_number: int, phase: str, parts: int = 1) -> list[Task]:
        """The units of every host, in so many calls at most."""
        by_host: dict[int, list[tuple[int, ...]]] = {}
        for unit in units:
            by_host.setdefault(self._host_of[unit[0]], []).append(unit)
        made = []
        for host, mine in sorted(by_host.items()):
            size = -(-len(mine) // parts)
            made += [Task(host, tuple(mine[k : k + size]), round_number, phase) for k in range(0, len(mine), size)]
        return made

    def _brought(self, units: Units, handles: Mapping[int, ObjectRef] | None = None) -> tuple[list[int], list[Any]]:
        """What a call needs beside its own: each message once, its number for every client, and the states."""
        clients = [client for unit in units for client in unit]
        positions, unique = _unique([handles[client] for client in clients]) if handles else ([], [])
        return positions, [*unique, *(self.states.get(client) for client in clients)]

    def _trained(self, done: Sequence[Task]) -> Trained[ObjectRef]:
        reports: list[TrainReport] = [report for task in done for report, _ in task.good.values()]
        states = {
            c: ref for task in done for c, ref in zip(task.clients, task.refs[2:], strict=False) if c in task.good
        }
        self.failure_policy.tell_kept({c: words for task in done for c, (_, words) in task.good.items() if words})
        uplinks = [task.refs[1] for task in done if task.good]
        return Trained(uplinks, tuple(sorted(reports, key=lambda r: r.client)), states)


@contextmanager
def _known() -> Iterator[None]:
    """Raises `Displaced` of an object that is lost with its node."""
    try:
        yield
    except (RayTaskError, ObjectLostError) as error:
        check_lost(error)
        raise


def _alone(clients: Iterable[int]) -> list[tuple[int, ...]]:
    return [(client,) for client in clients]


def _unique(refs: Sequence[ObjectRef]) -> tuple[list[int], list[ObjectRef]]:
    """Each reference once, and for every entry its position among them; so a shared message is unpacked once a host."""
    order = {ref: at for at, ref in enumerate(dict.fromkeys(refs))}
    return [order[ref] for ref in refs], list(order)
