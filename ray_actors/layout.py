"""Which clients live on which actor, and the resources that each actor requests. This changes no result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pflsim.config.settings import Placement
from pflsim.errors import SettingsError

ACTOR_MB = 600
"""Memory reserved per actor in MiB: about 420 MiB of imports, the rest for computation."""
STEPS = 10_000
"""Ray counts CPUs and GPUs in ten-thousandths."""
LOCKSTEP_HINT = (
    "in a new run, set a smaller lockstep_clients, or lockstep=false (which changes the last digits of results)"
)


class ResourcesMissing(SettingsError):
    """The settings request more than is free. On a cluster, more may become free."""


class Node(NamedTuple):
    """The free resources of a node; memory in MiB."""

    address: str
    cpus: float
    gpus: float
    memory_mb: float

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPUs" if self.gpus else ""
        return f"{self.address}: {self.cpus:g} CPUs{gpus}, {self.memory_mb / 1024:.1f} GiB"


@dataclass(frozen=True, slots=True)
class Layout:
    """The clients of each actor, and the CPUs and GPUs that every actor requests, in steps of 0.0001."""

    groups: tuple[tuple[int, ...], ...]
    cpus: float
    gpus: float

    def host_of(self) -> dict[int, int]:
        """Return the index of the actor of each client."""
        return {client: index for index, group in enumerate(self.groups) for client in group}


def lay_out(
    work: Sequence[int], placement: Placement, nodes: Sequence[Node], stacks: Sequence[Sequence[int]] = ()
) -> Layout:
    """Assign clients to actors, and compute what each actor requests.

    Args:
        work: the work of each client, e.g. its mini-batches per round.
        placement: the placement settings.
        nodes: the free resources of each node.
        stacks: the clients that work together and stay on one actor.

    Raises:
        SettingsError: the settings contradict each other; `ResourcesMissing`: they request more than is free.
    """
    clients, gpus, per_gpu = len(work), placement.gpus, placement.actors_per_gpu
    stacked = {client for stack in stacks for client in stack}
    stacks = [*stacks, *((client,) for client in range(clients) if client not in stacked)]
    free = f". Free resources: {'; '.join(map(str, nodes)) or 'none'}"
    if gpus > (seen := sum(int(node.gpus) for node in nodes)):
        raise ResourcesMissing(f"placement.gpus={gpus}, but Ray has {seen} GPUs: request fewer{free}")
    nodes = [node for node in nodes if node.gpus >= 1] if gpus else nodes
    most = placement.cpus or math.inf
    slots = [min(int(n.gpus) * per_gpu if gpus else int(n.cpus), int(n.memory_mb // ACTOR_MB)) for n in nodes]
    if not gpus and placement.actors is None and sum(node.cpus for node in nodes) < 1:
        raise ResourcesMissing(f"the clients need at least 1 CPU: other jobs may use them{free}")
    limit = gpus * per_gpu if gpus else most
    actors = _count(placement, clients, len(stacks), min(limit, sum(slots)))
    if gpus and actors > limit:
        asked = f"placement.gpus={gpus} with placement.actors_per_gpu={per_gpu} allows {limit}"
        raise SettingsError(f"{actors} client actors need a GPU, but {asked}: raise one of them")
    per_actor = placement.clients_per_actor
    max_clients = None if placement.actors is not None or per_actor == "auto" else int(per_actor)
    groups = balance(work, actors, max_clients, stacks)
    if not gpus:
        cpus = [node.cpus for node in nodes]
        cpus = [min(sum(cpus), placement.cpus)] if placement.cpus and placement.cpus < sum(cpus) else cpus
        return Layout(groups, share(cpus, actors), 0.0)
    sharing = -(-actors // gpus)
    each = min(min(node.cpus, most) / (int(node.gpus) * sharing) for node in nodes)
    return Layout(groups, min(1.0, int(each * STEPS) / STEPS), int(STEPS / sharing) / STEPS)


def _count(placement: Placement, clients: int, stacks: int, slots: float) -> int:
    """Return the configured number of actors, or one per stack, limited by the free resources."""
    if placement.actors is not None:
        if placement.actors > stacks:
            why = f"is more than {stacks}, the number of stacks and groups of clients, each on one actor"
            raise SettingsError(f"placement.actors={placement.actors} {why}: lower it, or {LOCKSTEP_HINT}")
        return placement.actors
    if placement.clients_per_actor != "auto":
        return -(-clients // placement.clients_per_actor)
    return int(max(1, min(stacks, slots)))


def share(cpus: Sequence[float], actors: int) -> float:
    """Return the CPUs of each actor: 1, or the largest share with which all actors fit on nodes with these CPUs."""
    steps = [int(round(amount * STEPS, 3)) for amount in cpus]
    shares = {min(STEPS, amount // number) for amount in steps for number in range(1, actors + 1)} - {0}
    fitting = [share for share in shares if sum(amount // share for amount in steps) >= actors]
    return max(fitting, default=STEPS) / STEPS


def balance(
    work: Sequence[int], groups: int, max_clients: int | None, stacks: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Distribute clients over groups: longest first, each to the group that finishes it first.

    Ties go to the group with fewer clients, then to the first one. No group stays empty while there are clients.

    Args:
        work: the work of each client.
        groups: the number of groups.
        max_clients: the maximum number of clients per group.
        stacks: the clients that stay together, every client in one stack.

    Raises:
        SettingsError: a stack does not fit into any group.
    """
    stack_work = [sum(max(work[client], 1) for client in stack) for stack in stacks]
    loads, members = [0] * groups, [list[int]() for _ in range(groups)]
    order = sorted(range(len(stacks)), key=lambda k: (-stack_work[k], stacks[k][0]))
    for assigned, k in enumerate(order):
        room = [g for g in range(groups) if max_clients is None or len(members[g]) + len(stacks[k]) <= max_clients]
        if not room:
            why = f"but {len(stacks[k])} clients train or are evaluated together, on one actor"
            raise SettingsError(f"placement.clients_per_actor={max_clients}, {why}: raise it, or {LOCKSTEP_HINT}")
        empty = [g for g in room if not members[g]]
        best = min(empty if len(empty) >= len(order) - assigned else room, key=lambda g: (loads[g], len(members[g]), g))
        members[best].extend(stacks[k])
        loads[best] += stack_work[k]
    return tuple(tuple(sorted(group)) for group in members)
