"""n classes per client and k examples per class, both with noise."""

from __future__ import annotations

import math

import numpy as np

from pflsim.data.partitions.deal import check_classes, choose_classes, class_sizes, deal
from pflsim.errors import SettingsError


def n_way_k_shot(
    labels: np.ndarray,
    num_classes: int,
    clients: int,
    rng: np.random.Generator,
    writers: np.ndarray | None,
    *,
    n: int = 3,
    k: int = 100,
    std: float = 2.0,
) -> list[np.ndarray]:
    """Give client i n_i classes with k_i examples each; n_i and k_i scatter around n and k with deviation `std`.

    The heterogeneity of FedProto (Tan et al. 2022, arXiv:2105.00243, section 5.1) and of pFedPM (section V-A).

    Args:
        labels: [n] int.
        num_classes: C.
        clients: N.
        rng: draws n_i, k_i, the classes and the examples.
        writers: not used.
        n: average number of classes of a client.
        k: average number of examples of each of its classes.
        std: standard deviation of n_i and of k_i (classes, examples).

    Raises:
        SettingsError: n beyond the classes, k < 1, std < 0, or a class with fewer examples than its clients ask for.

    Notes:
        n_i is normal, rounded, and held within min(2, n)..C: public code keeps to two classes at least as well. It
        draws classes independently; here all are used equally often, so that k is not limited by an unlucky draw.
    """
    present = check_classes("partition.n", n, labels, num_classes)
    if k < 1 or not (math.isfinite(std) and std >= 0):
        raise SettingsError(f"n_way_k_shot with k={k}, std={std}: needs k ≥ 1 and std ≥ 0")
    std = abs(std)  # which may be -0.0
    ways = np.clip(np.rint(rng.normal(n, std, clients)).astype(np.int64), min(2, n), len(present))
    shots = np.maximum(np.rint(rng.normal(k, std, clients)).astype(np.int64), 1)
    held = choose_classes(ways, present, rng)
    counts = np.zeros((clients, num_classes), dtype=np.int64)
    counts[:, : held.shape[1]] = held * shots[:, None]
    there, asked = class_sizes(labels, num_classes), counts.sum(axis=0)
    if (asked > there).any():
        c = int(np.argmax(asked - there))
        holders = int((counts[:, c] > 0).sum())
        raise SettingsError(
            f"n_way_k_shot with k={k}: {holders} of {clients} clients ask for {asked[c]} examples of class {c}, which "
            f"has {there[c]}; set partition.k to about {max(int(there[c] // holders - std), 1)} or less, or use fewer "
            "clients"
        )
    return deal(labels, counts, rng)
