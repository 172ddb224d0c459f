"""Label skew with a Dirichlet distribution per client."""

from __future__ import annotations

import numpy as np

from pflsim.data.partitions.deal import apportion, check_alpha, class_sizes, deal
from pflsim.errors import SettingsError

SIZES = ((0.1, 2), (0.3, 5), (0.3, 10), (0.2, 15), (0.1, 20))
"""Fractions of the clients and their relative sizes: 100, 250, 500, 750, 1000 examples."""


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
    check_alpha(alpha)
    if not 0 < used <= 1:
        raise SettingsError(f"partition.used={used} is not in (0, 1]; expected a fraction of the examples")
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
