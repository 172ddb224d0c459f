"""Which clients live on which actor, and what an actor asks of Ray.

Nothing here can change a result, but where some clients are on GPUs and others on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pflsim.config.settings import Placement
from pflsim.errors import SettingsError
from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec, Node
from ray_actors.placement.balance import LOOSEN, balance
from ray_actors.placement.resources import Wanted, gpu_room, seated


@dataclass(frozen=True, slots=True)
class Supply:
    """What there is to place on: CPUs, GPUs, and free memory in MiB (None: unknown); on a cluster, node by node.

    There only whole CPUs and GPUs of a node count: halves on two nodes are not one.
    """

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
        whole = [(max(0, int(node.cpus)), max(0, int(node.gpus))) for node in kept]
        return cls(sum(cpus for cpus, _ in whole), sum(gpus for _, gpus in whole), nodes=tuple(kept))

    def __str__(self) -> str:
        if self.nodes:
            return "; ".join(str(node) for node in self.nodes)
        return f"{self.cpus:g} CPUs, {self.gpus:g} GPUs"


@dataclass(frozen=True, slots=True)
class Layout:
    """The clients of every actor, and what each actor asks for."""

    groups: tuple[tuple[int, ...], ...]
    specs: tuple[ActorSpec, ...]

    @classmethod
    def even(cls, groups: Sequence[tuple[int, ...]], cpus: float, gpus: float) -> Layout:
        """Actors that all ask for the same, on a machine of one's own."""
        return cls(tuple(groups), (ActorSpec(cpus, gpus),) * len(groups))

    def host_of(self) -> dict[int, int]:
        """The actor's index for every client."""
        return {client: index for index, group in enumerate(self.groups) for client in group}


def lay_out(work: Sequence[int], placement: Placement, supply: Supply, stacks: Sequence[Sequence[int]] = ()) -> Layout:
    """Place clients on actors, and actors on nodes.

    With `placement.cpu_actors` the clients of every actor follow from the work, the stacks and the settings alone, so
    that each client is on the same device every time; the actors on GPUs come first.

    Args:
        work: for every client its amount of work, e.g. mini-batches a round.
        placement: the settings; `actors_per_gpu` is a number by now.
        supply: what there is.
        stacks: clients that must stay together.

    Raises:
        SettingsError: more is asked for than there is.
    """
    clients = len(work)
    _check_supply(placement, supply)
    parts = [*stacks, *((client,) for client in sorted({*range(clients)} - {c for stack in stacks for c in stack}))]
    wanted = _wanted(clients, len(parts), placement, supply)
    per_actor = placement.clients_per_actor
    most = None if placement.actors is not None or per_actor == "auto" else int(per_actor)
    speeds = [placement.gpu_speed] * wanted.on_gpus + [1.0] * wanted.on_cpus
    groups = balance(work, len(speeds), most, parts, speeds)
    slots = placement.gpus * int(placement.actors_per_gpu)
    if wanted.on_gpus > slots:
        raise SettingsError(
            f"{wanted.on_gpus} client actors need {wanted.on_gpus} GPU places, but placement.gpus={placement.gpus} "
            f"with placement.actors_per_gpu={placement.actors_per_gpu} gives {slots}: raise one of them, or "
            "placement.clients_per_actor"
        )
    return Layout(groups, seated(wanted, placement, supply.cpus, supply.nodes))


def _check_supply(placement: Placement, supply: Supply) -> None:
    if placement.gpus > supply.gpus:
        raise SettingsError(
            f"placement.gpus={placement.gpus}, but Ray has {supply.gpus:g} GPUs here: "
            f"ask for fewer, or start Ray with more{_listed(supply)}"
        )
    if supply.cpus < 1 and (not placement.gpus or placement.cpu_actors):
        if supply.nodes:
            raise SettingsError(
                f"the clients need at least 1 CPU of the cluster, and {supply.cpus:g} are free now: wait longer for "
                f"one (placement.wait_s), since others may use them{_listed(supply)}"
            )
        raise SettingsError(f"Ray has {supply.cpus:g} CPUs here, and at least 1 is needed")


def _listed(supply: Supply) -> str:
    return f". Free are {supply}" if supply.nodes else ""


def _wanted(clients: int, parts: int, placement: Placement, supply: Supply) -> Wanted:
    """How many actors: as told, or one per part while there is room, else as many as there is room for."""
    if placement.actors is not None:
        if not 1 <= placement.actors <= clients:
            raise SettingsError(f"placement.actors={placement.actors} must be between 1 and clients={clients}")
        if placement.actors > parts:
            raise SettingsError(
                f"placement.actors={placement.actors}, but clients train in lockstep and a stack stays on one actor; "
                f"stacks: {parts}; {LOOSEN}"
            )
        return Wanted.of(placement.actors, placement)
    if placement.cpu_actors >= parts:
        raise SettingsError(
            f"placement.cpu_actors={placement.cpu_actors} leaves nobody for the GPUs: what stays on one actor, "
            f"clients or stacks of them, is {parts} in number; ask for fewer, or {LOOSEN}"
        )
    if placement.clients_per_actor != "auto":
        return Wanted.of(-(-clients // int(placement.clients_per_actor)), placement)
    per_gpu = int(placement.actors_per_gpu)
    if placement.cpu_actors:  # whatever the memory: the devices of the clients shall not depend on it
        return Wanted.of(min(parts, placement.gpus * per_gpu + placement.cpu_actors), placement)
    slots = placement.gpus * per_gpu if placement.gpus else int(supply.cpus)
    if supply.nodes:
        room = gpu_room(supply.nodes, placement, per_gpu) if placement.gpus else [n.slots() for n in supply.nodes]
        slots = min(slots, sum(room))
    if supply.free_mb is not None:
        slots = min(slots, int(supply.free_mb // ACTOR_MB))
    return Wanted.of(max(1, min(parts, slots)), placement)
