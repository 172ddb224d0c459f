"""Where client actors sit: what each asks for, on a machine of one's own or over the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pflsim.config.settings import Placement
from pflsim.errors import SettingsError
from ray_actors.placement.actor_spec import ACTOR_MB, ActorSpec, Node, share, spread_over


class Wanted(NamedTuple):
    """How many client actors there are to be, with a GPU or a part of one, and without."""

    on_gpus: int
    on_cpus: int

    @classmethod
    def of(cls, actors: int, placement: Placement) -> Wanted:
        """So many altogether."""
        return cls(actors - placement.cpu_actors, placement.cpu_actors) if placement.gpus else cls(0, actors)


def seated(wanted: Wanted, placement: Placement, cpus: float, nodes: Sequence[Node]) -> tuple[ActorSpec, ...]:
    """The seats of all actors, those with a GPU first.

    No two actors share a GPU while another has none, and no more share one than must. On a cluster the strategy decides
    which GPUs are used, where there are more than the settings ask for, and on which nodes actors without one are.

    Args:
        wanted: how many.
        placement: the settings.
        cpus: that there are altogether.
        nodes: of the cluster; none on a machine of one's own.

    Raises:
        SettingsError: the memory of the nodes does not hold them.
    """
    if not nodes:
        each, part = share(cpus, sum(wanted)), _part(wanted.on_gpus, placement.gpus)
        return (ActorSpec(each, part),) * wanted.on_gpus + (ActorSpec(each, 0.0),) * wanted.on_cpus
    on_gpus, granted = _over_gpus(wanted.on_gpus, placement, nodes)
    on_cpus = _over_cpus(wanted.on_cpus, placement, nodes, on_gpus)
    counts = [a + b for a, b in zip(on_gpus, on_cpus, strict=True)]
    if sum(counts) < sum(wanted) or any(count > node.holds for count, node in zip(counts, nodes, strict=True)):
        raise SettingsError(
            f"{sum(wanted)} client actors need {sum(wanted) * ACTOR_MB / 1024:.1f} GiB of memory, {ACTOR_MB} MiB each, "
            "beside their CPUs: ask for fewer (placement.actors, placement.clients_per_actor). Free are "
            f"{'; '.join(map(str, nodes))}"
        )
    parts = [_part(count, gpus) for count, gpus in zip(on_gpus, granted, strict=True)]
    shares = [share(node.cpus, count) for node, count in zip(nodes, counts, strict=True)]
    return tuple(
        ActorSpec(shares[n], parts[n] if specs is on_gpus else 0.0, node.id)
        for specs in (on_gpus, on_cpus)
        for n, node in enumerate(nodes)
        for _ in range(specs[n])
    )


def gpu_room(nodes: Sequence[Node], placement: Placement, per_gpu: int) -> list[int]:
    """For how many actors on GPUs each node has room, with so many to a GPU."""
    return _room(nodes, _granted(nodes, placement, per_gpu), per_gpu)


def _room(nodes: Sequence[Node], granted: Sequence[int], per_gpu: int) -> list[int]:
    return [min(gpus * per_gpu, node.holds) for gpus, node in zip(granted, nodes, strict=True)]


def _granted(nodes: Sequence[Node], placement: Placement, per_gpu: int) -> list[int]:
    """How many GPUs of each node are used, of nodes that hold an actor at all.

    First those for which the memory of their node holds as many actors as are to share one; then those with the most
    actors; then others, for fewer to share one.
    """
    whole = [int(node.gpus) if node.holds else 0 for node in nodes]
    filled = [min(gpus, node.holds // per_gpu) for gpus, node in zip(whole, nodes, strict=True)]
    granted = spread_over(nodes, filled, min(placement.gpus, sum(filled)), placement.strategy)
    if sum(granted) < placement.gpus:
        left = [n for n, node in enumerate(nodes) if granted[n] < whole[n] and node.holds % per_gpu]
        left.sort(key=lambda n: (-(nodes[n].holds % per_gpu), not nodes[n].here, nodes[n].address, nodes[n].id))
        for n in left[: placement.gpus - sum(granted)]:
            granted[n] += 1
    rest = [gpus - used for gpus, used in zip(whole, granted, strict=True)]
    more = spread_over(nodes, rest, min(placement.gpus - sum(granted), sum(rest)), placement.strategy)
    return [a + b for a, b in zip(granted, more, strict=True)]


def _over_gpus(actors: int, placement: Placement, nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
    """How many actors on GPUs each node gets, fewer altogether where there is no room for more; and on how many."""
    room, granted = [0] * len(nodes), [0] * len(nodes)
    if not placement.gpus:
        return room, granted
    for per_gpu in range(max(1, -(-actors // placement.gpus)), int(placement.actors_per_gpu) + 1):
        granted = _granted(nodes, placement, per_gpu)
        room = _room(nodes, granted, per_gpu)
        if sum(room) >= actors:
            break
    # the strategy has had its say in `_granted`
    return spread_over(nodes, room, min(actors, sum(room)), "spread"), granted


def _over_cpus(actors: int, placement: Placement, nodes: Sequence[Node], others: Sequence[int]) -> list[int]:
    """How many actors on CPUs each node gets, beside others: one a CPU, and more only where there are not enough."""
    room = [node.slots(other) for node, other in zip(nodes, others, strict=True)]
    if sum(room) < actors:  # those on GPUs share their CPUs then
        room = [node.slots() for node in nodes]
    most = [max(0, node.holds - other) for node, other in zip(nodes, others, strict=True)]
    return spread_over(nodes, room, actors, placement.strategy, most)


def _part(actors: int, gpus: int) -> float:
    """What of a GPU each actor gets, where so many are on so many of them."""
    return share(1, -(-actors // gpus)) if actors else 0.0
