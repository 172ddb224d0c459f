"""Dividing clients among actors so that all are done at about the same time."""

from __future__ import annotations

from collections.abc import Sequence

from pflsim.errors import SettingsError

LOOSEN = (
    "set a smaller lockstep_clients, 1 for stacks of one, or lockstep=false (it changes the last digits of the results)"
)


def balance(
    work: Sequence[int],
    groups: int,
    most: int | None = None,
    parts: Sequence[Sequence[int]] | None = None,
    speeds: Sequence[float] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Spread clients over groups that shall be done at the same time (longest first, to where it is done soonest).

    Ties go to the group with fewer clients, then to the first; a group is never left empty while there are clients: the
    shortest go to those that would be.

    Args:
        work: of every client.
        groups: how many.
        most: clients that a group may get.
        parts: clients that stay together, all of them in one part; None: each for itself.
        speeds: of every group; None: all are alike.

    Raises:
        SettingsError: a part is larger than `most`, or does not fit any more.
    """
    parts = [(client,) for client in range(len(work))] if parts is None else parts
    speeds = [1.0] * groups if speeds is None else speeds
    loads = [sum(max(work[client], 1) for client in part) for part in parts]
    held, members = [0] * groups, [list[int]() for _ in range(groups)]
    order = sorted(range(len(parts)), key=lambda k: (-loads[k], parts[k][0]))
    for taken, at in enumerate(order):
        room = [g for g in range(groups) if most is None or len(members[g]) + len(parts[at]) <= most]
        if not room:
            raise SettingsError(
                f"placement.clients_per_actor={most}, but {len(parts[at])} clients train in lockstep and stay on one "
                f"actor: {LOOSEN}"
            )
        empty = [g for g in room if not members[g]]
        if len(empty) >= len(order) - taken:
            room = empty
        best = min(room, key=lambda g: ((held[g] + loads[at]) / speeds[g], len(members[g]), g))
        members[best].extend(parts[at])
        held[best] += loads[at]
    return tuple(tuple(sorted(group)) for group in members)
