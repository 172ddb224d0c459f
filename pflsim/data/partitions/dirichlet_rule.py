"""Label skew with a Dirichlet distribution per class or per client."""

from typing import Annotated

import numpy as np
from annotated_types import Gt, Le

from pflsim.config.validate import Positive
from pflsim.data.partitions.deal import Pool, apportion, partition_rule
from pflsim.errors import SettingsError

SIZES = ((0.1, 2), (0.3, 5), (0.3, 10), (0.2, 15), (0.1, 20))
"""Fractions of the clients and their relative sizes: 100, 250, 500, 750, 1000 examples."""


@partition_rule
def dirichlet(pool: Pool, *, alpha: Positive = 0.1, min_examples: int = 10, balance: bool = True) -> list[np.ndarray]:
    """Divide each class over the clients in proportions p_c ~ Dirichlet(α, ..., α). All examples are used.

    Hsu et al. 2019 (arXiv:1909.06335) in the form of NIID-Bench (Li et al. 2022, arXiv:2102.02079) and PFLlib.

    Args:
        pool: the examples and the number of clients.
        alpha: concentration; small is skewed (0.01: nearly one class per client), large is even.
        min_examples: minimum number of examples per client.
        balance: give no further classes to clients that hold n/N examples.

    Raises:
        SettingsError: alpha is not positive, or there are fewer than clients · min_examples examples.

    Notes:
        Public code redraws until each client has min_examples, which may not terminate for many clients or a small α.
        Here clients below the minimum receive examples of the largest class of the largest client.
    """
    needed = max(min_examples, 1)
    examples, clients = len(pool.labels), pool.clients
    if min_examples < 0 or clients * needed > examples:
        raise SettingsError(
            f"{clients} clients with partition.min_examples={min_examples} need {clients * needed} examples, but only "
            f"{examples} exist: set min_examples to 0..{examples // clients} or clients to at most {examples // needed}"
        )
    counts = pool.no_counts
    for c, size in enumerate(pool.sizes):
        if size:
            counts[:, c] = apportion(_proportions(pool, alpha, counts.sum(axis=1), balance), int(size))
    return pool.deal(_repair(counts, needed))


def _proportions(pool: Pool, alpha: float, held: np.ndarray, balance: bool) -> np.ndarray:
    """Draw one class's proportions [N]; with `balance`, clients with n/N examples or more receive none."""
    p = pool.rng.dirichlet(np.full(len(held), alpha))
    room = held < len(pool.labels) / len(held)
    if not (balance and room.any()):
        room = np.ones(len(held), dtype=bool)
    p = np.where(np.isfinite(p), p, 0.0) * room
    if p.sum() <= 0:
        # The draw underflowed, or fell on full clients only: the limit for small α is a single client.
        p[pool.rng.choice(np.flatnonzero(room))] = 1.0
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


@partition_rule
def dirichlet_by_client(
    pool: Pool, *, alpha: Positive = 0.1, used: Annotated[float, Gt(0), Le(1)] = 0.97, balanced: bool = False
) -> list[np.ndarray]:
    """Draw each client's class proportions p_i ~ Dirichlet(α, ..., α), independently of its size.

    Fraboni et al. 2021 (Clustered Sampling, section 5), which FedALP follows: 10, 30, 30, 20 and 10 of 100 clients hold
    100, 250, 500, 750 and 1,000 training examples of CIFAR-10, and a fifth of that for testing. With a small α, a
    client has one class and a class has many clients; in partition=dirichlet, a class then has one client.

    Args:
        pool: the examples and the number of clients.
        alpha: concentration; small is skewed, large is even.
        used: fraction of the examples to assign, in (0, 1]; 0.97 is the paper's 58,200 of 60,000.
        balanced: use equal sizes instead of the five sizes.

    Raises:
        SettingsError: alpha is not positive, or used is out of range.

    Notes:
        Public code draws with replacement, so clients share examples. Here each example is assigned at most once:
        clients draw in random order, and the proportions are renormalised when a class is exhausted, as in Hsu et al.
        2019.
    """
    sizes = apportion(_weights(pool.clients, balanced), int(used * len(pool.labels) + 1e-9))
    room = pool.sizes
    proportions = pool.rng.dirichlet(np.full(pool.num_classes, alpha), size=pool.clients)
    counts = pool.no_counts
    for client in pool.rng.permutation(pool.clients):
        while (missing := sizes[client] - counts[client].sum()) > 0:
            left = np.where(np.isfinite(proportions[client]), proportions[client], 0.0) * (room > 0)
            wanted = apportion(left if left.sum() > 0 else room.astype(float), int(missing), pool.rng)
            taken = np.minimum(wanted, room)
            counts[client] += taken
            room = room - taken
    return pool.deal(counts)


def _weights(clients: int, balanced: bool) -> np.ndarray:
    """Return the relative sizes of the clients, [N], in ascending order."""
    if balanced:
        return np.ones(clients)
    ends = np.round(np.cumsum([share for share, _ in SIZES]) * clients).astype(int)
    return np.array([float(SIZES[np.searchsorted(ends, i, side="right")][1]) for i in range(clients)])
