"""Label skew with a Dirichlet distribution per class."""

from __future__ import annotations

import numpy as np

from pflsim.data.partitions.deal import apportion, check_alpha, class_sizes, deal
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
    """Divide each class over the clients in proportions p_c ~ Dirichlet(α, ..., α). All examples are used.

    Hsu et al. 2019 (arXiv:1909.06335) in the form of NIID-Bench (Li et al. 2022, arXiv:2102.02079) and PFLlib.

    Args:
        labels: [n] int.
        num_classes: C.
        clients: N.
        rng: draws the proportions and the examples.
        writers: unused.
        alpha: concentration; small is skewed (0.01: nearly one class per client), large is even.
        min_examples: minimum number of examples per client.
        balance: give no further classes to clients that hold n/N examples.

    Raises:
        SettingsError: alpha is not positive, or there are fewer than clients · min_examples examples.

    Notes:
        Public code redraws until each client has min_examples, which may not terminate for many clients or a small α.
        Here clients below the minimum receive examples of the largest class of the largest client.
    """
    check_alpha(alpha)
    needed = max(min_examples, 1)
    if min_examples < 0 or clients * needed > len(labels):
        raise SettingsError(
            f"{clients} clients with partition.min_examples={min_examples} need {clients * needed} examples, but only "
            f"{len(labels)} exist: set min_examples to 0..{len(labels) // clients} or clients to at most "
            f"{len(labels) // needed}"
        )
    counts = np.zeros((clients, num_classes), dtype=np.int64)
    for c, size in enumerate(class_sizes(labels, num_classes)):
        if size:
            counts[:, c] = apportion(_proportions(alpha, counts.sum(axis=1), len(labels), balance, rng), int(size))
    return deal(labels, _repair(counts, needed), rng)


def _proportions(alpha: float, held: np.ndarray, examples: int, balance: bool, rng: np.random.Generator) -> np.ndarray:
    """Draw one class's proportions [N]; with `balance`, clients with n/N examples or more receive none."""
    p = rng.dirichlet(np.full(len(held), alpha))
    p = np.where(np.isfinite(p), p, 0.0)
    room = held < examples / len(held) if balance else np.ones(len(held), dtype=bool)
    room = room if room.any() else np.ones(len(held), dtype=bool)
    p = p * room
    if p.sum() <= 0:
        # The draw underflowed, or fell on full clients only: the limit for small α is a single client.
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
