"""Label skew with a Dirichlet distribution per class or per client."""

from __future__ import annotations

import numpy as np

from pflsim.config.validate import Bounds, positive
from pflsim.data.partitions.deal import apportion, class_sizes, deal, in_content_order
from pflsim.errors import SettingsError

SIZES = ((0.1, 2), (0.3, 5), (0.3, 10), (0.2, 15), (0.1, 20))
"""Fractions of the clients and their relative sizes: 100, 250, 500, 750, 1000 examples."""


@in_content_order
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
    positive("partition.alpha", alpha)
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


@in_content_order
def dirichlet_by_client(
    labels: np.ndarray,
    num_classes: int,
    clients: int,
    rng: np.random.Generator,
    writers: np.ndarray | None,
    *,
    alpha: float = 0.1,
    used: float = 0.97,
    balanced: bool = False,
) -> list[np.ndarray]:
    """Draw each client's class proportions p_i ~ Dirichlet(α, ..., α), independently of its size.

    Fraboni et al. 2021 (Clustered Sampling, section 5), which FedALP follows: 10, 30, 30, 20 and 10 of 100 clients hold
    100, 250, 500, 750 and 1,000 training examples of CIFAR-10, and a fifth of that for testing. With a small α, a
    client has one class and a class has many clients; in partition=dirichlet, a class then has one client.

    Args:
        labels: [n] int.
        num_classes: C.
        clients: N.
        rng: draws the proportions, the order of the clients and the examples.
        writers: unused.
        alpha: concentration; small is skewed, large is even.
        used: fraction of the examples to assign, in (0, 1]; 0.97 is the paper's 58,200 of 60,000.
        balanced: use equal sizes instead of the five sizes.

    Raises:
        SettingsError: alpha is not positive, used is out of range, or there are fewer examples than clients.

    Notes:
        Public code draws with replacement, so clients share examples. Here each example is assigned at most once:
        clients draw in random order, and the proportions are renormalised when a class is exhausted, as in Hsu et al.
        2019.
    """
    positive("partition.alpha", alpha)
    Bounds(above=0, most=1)("partition.used", used)
    total = int(used * len(labels) + 1e-9)
    sizes = apportion(_weights(clients, balanced), total)
    if sizes.min() < 1:
        raise SettingsError(
            f"{clients} clients cannot share {total} examples in these sizes: the smallest would get none. Use fewer "
            "clients, a larger partition.used or partition.balanced=true"
        )
    room = class_sizes(labels, num_classes)
    proportions = rng.dirichlet(np.full(num_classes, alpha), size=clients)
    counts = np.zeros((clients, num_classes), dtype=np.int64)
    for client in rng.permutation(clients):
        while (missing := sizes[client] - counts[client].sum()) > 0:
            left = np.where(np.isfinite(proportions[client]), proportions[client], 0.0) * (room > 0)
            wanted = apportion(left if left.sum() > 0 else room.astype(float), int(missing), rng)
            taken = np.minimum(wanted, room)
            counts[client] += taken
            room = room - taken
    return deal(labels, counts, rng)


def _weights(clients: int, balanced: bool) -> np.ndarray:
    """Return the relative sizes of the clients, [N], in ascending order."""
    if balanced:
        return np.ones(clients)
    ends = np.round(np.cumsum([share for share, _ in SIZES]) * clients).astype(int)
    return np.array([float(SIZES[np.searchsorted(ends, i, side="right")][1]) for i in range(clients)])
