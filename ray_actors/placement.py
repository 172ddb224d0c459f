"""Which clients live on which actor, and what an actor asks of Ray. Nothing here can change a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pflsim.errors import SettingsError
from pflsim.settings import Placement
from ray_actors.seats import ACTOR_MB, Node, Seat, share, spread_over


@dataclass(frozen=True, slots=True)
class Supply:
    """What there is to place on: CPUs, GPUs, and free memory in MiB (None: unknown); on a cluster, node by node."""

    cpus: float
    gpus: float
    free_mb: float | None = None
    nodes: tuple[Node, ...] = ()

    @classmethod
    def of(cls, nodes: Sequence[Node], most_cpus: int | None = None) -> Supply:
        """What is free on some nodes, of which no more CPUs than so many are to be used."""
        kept, left = [], float("inf") if most_cpus is None else float(most_cpus)
        for node in sorted(nodes, key=lambda n: (not n.here, -n.cpus, n.address, n.id)):
            kept.append(replace(node, cpus=min(node.cpus, left)))
            left -= kept[-1].cpus
        return cls(sum(n.cpus for n in kept), sum(n.gpus for n in kept), nodes=tuple(kept))

    def __str__(self) -> str:
        if self.nodes:
            return "; ".join(str(node) for node in self.nodes)
        return f"{self.cpus:g} CPUs, {self.gpus:g} GPUs"


@dataclass(frozen=True, slots=True)
class Layout:
    """The clients of every actor, and what each actor asks for."""

    groups: tuple[tuple[int, ...], ...]
    seats: tuple[Seat, ...]

    @classmethod
    def even(cls, groups: Sequence[tuple[int, ...]], cpus: float, gpus: float) -> Layout:
        """Actors that all ask for the same, on a machine of one's own."""
        return cls(tuple(groups), (Seat(cpus, gpus),) * len(groups))

    def host_of(self) -> dict[int, int]:
        """The actor's index for every client."""
        return {client: index for index, group in enumerate(self.groups) for client in group}


def lay_out(work: Sequence[int], placement: Placement, supply: Supply, stacks: Sequence[Sequence[int]] = ()) -> Layout:
    """Place clients on actors, and actors on nodes.

    Args:
        work: for every client its amount of work, e.g. mini-batches a round.
        placement: the settings.
        supply: what there is.
        stacks: clients that must stay together.

    Raises:
        SettingsError: more is asked for than there is.
    """
    clients = len(work)
    if placement.gpus > supply.gpus:
        raise SettingsError(
            f"placement.gpus={placement.gpus}, but Ray has {supply.gpus:g} GPUs here: "
            f"ask for fewer, or start Ray with more{_listed(supply)}"
        )
    if supply.cpus < 1 and not placement.gpus:
        raise SettingsError(f"Ray has {supply.cpus:g} CPUs here, and at least 1 is needed{_listed(supply)}")
    parts = [*stacks, *((client,) for client in sorted({*range(clients)} - {c for stack in stacks for c in stack}))]
    actors = _actors(clients, len(parts), placement, supply)
    per_actor = placement.clients_per_actor
    most = None if placement.actors is not None or per_actor == "auto" else int(per_actor)
    groups = balance(work, actors, most, parts)
    if placement.gpus:
        slots = placement.gpus * placement.actors_per_gpu
        if actors > slots:
            raise SettingsError(
                f"{actors} client actors need {actors} GPU places, but placement.gpus={placement.gpus} with "
                f"placement.actors_per_gpu={placement.actors_per_gpu} gives {slots}: raise one of them, or "
                "placement.clients_per_actor"
            )
    return Layout(groups, _seats(actors, placement, supply))


def _seats(actors: int, placement: Placement, supply: Supply) -> tuple[Seat, ...]:
    """What each actor asks for, and where it is."""
    gpus = 1 / placement.actors_per_gpu if placement.gpus else 0.0
    if not supply.nodes:
        return (Seat(share(supply.cpus, actors), gpus),) * actors
    per_gpu = placement.actors_per_gpu if placement.gpus else None
    room = [node.slots(per_gpu) for node in supply.nodes]
    held = [int(node.memory_mb // ACTOR_MB) for node in supply.nodes]
    counts = spread_over(supply.nodes, room, actors, placement.strategy) if any(room) else []
    if not counts or any(count > most for count, most in zip(counts, held, strict=True)):
        raise SettingsError(
            f"{actors} client actors need {actors * ACTOR_MB / 1024:.1f} GiB of memory, {ACTOR_MB} MiB each, beside "
            f"their CPUs: ask for fewer (placement.actors, placement.clients_per_actor){_listed(supply)}"
        )
    return tuple(
        Seat(share(node.cpus, count), gpus, node.id)
        for node, count in zip(supply.nodes, counts, strict=True)
        for _ in range(count)
    )


def _listed(supply: Supply) -> str:
    return f". Free are {supply}" if supply.nodes else ""


def _actors(clients: int, parts: int, placement: Placement, supply: Supply) -> int:
    """How many actors: as told, or one per part while there is room, else as many as there is room for."""
    if placement.actors is not None:
        if not 1 <= placement.actors <= clients:
            raise SettingsError(f"placement.actors={placement.actors} must be between 1 and clients={clients}")
        if placement.actors > parts:
            raise SettingsError(
                f"placement.actors={placement.actors}, but clients train in lockstep and a stack stays on one actor; "
                f"stacks: {parts}; {_LOOSEN}"
            )
        return placement.actors
    if placement.clients_per_actor != "auto":
        return -(-clients // int(placement.clients_per_actor))
    slots = placement.gpus * placement.actors_per_gpu if placement.gpus else int(supply.cpus)
    if supply.nodes:
        per_gpu = placement.actors_per_gpu if placement.gpus else None
        slots = min(slots, sum(node.slots(per_gpu) for node in supply.nodes))
    if supply.free_mb is not None:
        slots = min(slots, int(supply.free_mb // ACTOR_MB))
    return max(1, min(parts, slots))


_LOOSEN = (
    "set a smaller lockstep_clients, 1 for stacks of one, or lockstep=false (it changes the last digits of the results)"
)


def balance(
    work: Sequence[int], groups: int, most: int | None = None, parts: Sequence[Sequence[int]] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Spread clients over groups so that each has about the same work (longest first, onto the least loaded).

    Ties go to the group with fewer clients, then to the first; a group is never left empty while there are clients.

    Args:
        work: of every client.
        groups: how many.
        most: clients that a group may get.
        parts: clients that stay together, all of them in one part; None: each for itself.

    Raises:
        SettingsError: a part is larger than `most`, or does not fit any more.
    """
    parts = [(client,) for client in range(len(work))] if parts is None else parts
    loads = [sum(max(work[client], 1) for client in part) for part in parts]
    held, members = [0] * groups, [list[int]() for _ in range(groups)]
    for at in sorted(range(len(parts)), key=lambda k: (-loads[k], parts[k][0])):
        room = [g for g in range(groups) if most is None or len(members[g]) + len(parts[at]) <= most]
        if not room:
            raise SettingsError(
                f"placement.clients_per_actor={most}, but {len(parts[at])} clients train in lockstep and stay on one "
                f"actor: {_LOOSEN}"
            )
        best = min(room, key=lambda g: (held[g], len(members[g]), g))
        members[best].extend(parts[at])
        held[best] += loads[at]
    return tuple(tuple(sorted(group)) for group in members)
