"""Distributes clients over actors so that all actors finish at about the same time."""

from __future__ import annotations

from collections.abc import Sequence

from pflsim.errors import SettingsError

LOCKSTEP_HINT = "set lockstep_clients to a smaller number, or lockstep=false (which changes the last digits of results)"


def balance(
    work: Sequence[int],
    groups: int,
    max_clients: int | None = None,
    stacks: Sequence[Sequence[int]] | None = None,
    speeds: Sequence[float] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Distribute clients over groups: longest first, each to the group that finishes it first.

    Ties go to the group with fewer clients, then to the first one. No group stays empty while there are clients.

    Args:
        work: the work of each client.
        groups: the number of groups.
        max_clients: the maximum number of clients per group.
        stacks: the clients that stay together, every client in one stack; None: each client on its own.
        speeds: the relative speed of each group; None: all equal.

    Raises:
        SettingsError: a stack does not fit into any group.
    """
    stacks = [(client,) for client in range(len(work))] if stacks is None else stacks
    speeds = [1.0] * groups if speeds is None else speeds
    stack_work = [sum(max(work[client], 1) for client in stack) for stack in stacks]
    loads, members = [0] * groups, [list[int]() for _ in range(groups)]
    order = sorted(range(len(stacks)), key=lambda k: (-stack_work[k], stacks[k][0]))
    for assigned, k in enumerate(order):
        open_groups = [
            g for g in range(groups) if max_clients is None or len(members[g]) + len(stacks[k]) <= max_clients
        ]
        if not open_groups:
            why = f"but {len(stacks[k])} clients train in lockstep on one actor"
            raise SettingsError(f"placement.clients_per_actor={max_clients}, {why}: raise it, or {LOCKSTEP_HINT}")
        empty = [g for g in open_groups if not members[g]]
        if len(empty) >= len(order) - assigned:
            open_groups = empty
        best = min(open_groups, key=lambda g: ((loads[g] + stack_work[k]) / speeds[g], len(members[g]), g))
        members[best].extend(stacks[k])
        loads[best] += stack_work[k]
    return tuple(tuple(sorted(group)) for group in members)
