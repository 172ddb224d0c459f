"""Label skew by a Dirichlet distribution, in bounded time."""

from __future__ import annotations

import math

import numpy as np

from pflsim.data.partitions.deal import apportion, class_sizes, deal
from pflsim.errors import SettingsError


def dirichlet(
    labels: np.ndarray,
    num_classes: int,
    clients: int,
    rng: np.random.Generator,
    writers: np.ndarray | None,
    *,
    alpha: float = 0.1,
    min_examples: int = 10,
    balance: bool = True,
) -> list[np.ndarray]:
    """Share each class out over the clients in proportions p_c ~ Dirichlet(α, ..., α). Every example is used.

    Hsu et al. 2019 (arXiv:1909.06335) in the form of NIID-Bench (Li et al. 2022, arXiv:2102.02079) and PFLlib.

    Args:
        labels: [n] int.
        num_classes: C.
        clients: N.
        rng: draws the proportions and the examples.
        writers: not used.
        alpha: concentration; small is skewed (0.01: nearly one class a client), large is even.
        min_examples: every client gets at least so many examples.
        balance: a client that already holds n/N examples gets nothing of the classes still to come.

    Raises:
        SettingsError: alpha not a positive number, or more examples promised than there are.

    Notes:
        Public code draws again until every client has min_examples, which for many clients or a small α never ends.
        Here one draw is repaired: a client below the minimum takes examples of the largest class of the largest client.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise SettingsError(f"partition.alpha={alpha} is not a positive number; usual values are 0.01 to 100")
    needed = max(min_examples, 1)
    if min_examples < 0 or clients * needed > len(labels):
        raise SettingsError(
            f"{clients} clients with partition.min_examples={min_examples} need {clients * needed} examples, there are "
            f"{len(labels)}: set min_examples to 0..{len(labels) // clients} or clients to at most "
            f"{len(labels) // needed}"
        )
    counts = np.zeros((clients, num_classes), dtype=np.int64)
    for c, size in enumerate(class_sizes(labels, num_classes)):
        if size:
            counts[:, c] = apportion(_proportions(alpha, counts.sum(axis=1), len(labels), balance, rng), int(size))
    return deal(labels, _repair(counts, needed), rng)


def _proportions(alpha: float, held: np.ndarray, examples: int, balance: bool, rng: np.random.Generator) -> np.ndarray:
    """Draw one class's proportions [N]; clients that hold their fair share already are left out when `balance`."""
    p = rng.dirichlet(np.full(len(held), alpha))
    p = np.where(np.isfinite(p), p, 0.0)
    room = held < examples / len(held) if balance else np.ones(len(held), dtype=bool)
    room = room if room.any() else np.ones(len(held), dtype=bool)
    p = p * room
    if p.sum() <= 0:
        # α so small that the draw underflowed, or that all of it fell on full clients: its limit is one client for all.
        p[rng.choice(np.flatnonzero(room))] = 1.0
    return p / p.sum()


def _repair(counts: np.ndarray, needed: int) -> np.ndarray:
    """Move examples from the largest clients to those with fewer than `needed`; needs N · needed ≤ all examples."""
    counts = counts.copy()
    sizes = counts.sum(axis=1)
    for client in np.flatnonzero(sizes < needed):
        while sizes[client] < needed:
            donor = int(np.argmax(sizes))
            c = int(np.argmax(counts[donor]))
            moved = min(needed - sizes[client], sizes[donor] - needed, counts[donor, c])
            counts[donor, c] -= moved
            counts[client, c] += moved
            sizes[donor] -= moved
            sizes[client] += moved
    return counts
