"""Label skew by a Dirichlet distribution of each client's own."""

from __future__ import annotations

import math

import numpy as np

from pflsim.data.partitions.deal import apportion, class_sizes, deal
from pflsim.errors import SettingsError

SIZES = ((0.1, 2), (0.3, 5), (0.3, 10), (0.2, 15), (0.1, 20))
"""Shares of the clients, and how much each holds in proportion: 100, 250, 500, 750, 1000 examples."""


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
    """Draw each client's class proportions p_i ~ Dirichlet(α, ..., α); its size does not depend on them.

    Fraboni et al. 2021 (Clustered Sampling, section 5), which FedALP follows: 10, 30, 30, 20 and 10 of 100 clients hold
    100, 250, 500, 750 and 1,000 training examples of CIFAR-10 and a fifth of that for the test. So with a small α a
    client has one class and a class many clients, where partition=dirichlet gives a class to one client.

    Args:
        labels: [n] int.
        num_classes: C.
        clients: N.
        rng: draws the proportions, the order of the clients and the examples.
        writers: not used.
        alpha: concentration; small is skewed, large is even.
        used: share of the examples that is given out, in (0, 1]; 0.97 are the paper's 58,200 of 60,000.
        balanced: all clients get the same amount, instead of the five sizes.

    Raises:
        SettingsError: alpha not a positive number, used out of range, or fewer examples than clients.

    Notes:
        Public code draws a class with replacement, so that clients share examples. Here no example is given twice: the
        clients choose in a random order, and one whose classes are used up goes on with what is left of its
        proportions, as in Hsu et al. 2019.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise SettingsError(f"partition.alpha={alpha} is not a positive number; usual values are 0.001 to 100")
    if not 0 < used <= 1:
        raise SettingsError(f"partition.used={used} is not in (0, 1]: it is a share of the examples")
    total = int(used * len(labels) + 1e-9)
    sizes = apportion(_weights(clients, balanced), total)
    if sizes.min() < 1:
        raise SettingsError(
            f"{clients} clients cannot share {total} examples in these sizes: the smallest would get none; use fewer "
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
    """How much every client holds in proportion, [N]; small clients first."""
    if balanced:
        return np.ones(clients)
    ends = np.round(np.cumsum([share for share, _ in SIZES]) * clients).astype(int)
    return np.array([float(SIZES[np.searchsorted(ends, i, side="right")][1]) for i in range(clients)])
