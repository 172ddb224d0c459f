"""About n classes per client and about k examples per class."""

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
    """Give client i n_i classes with k_i examples each; n_i and k_i are normal around n and k with deviation `std`.

    The heterogeneity of FedProto (Tan et al. 2022, arXiv:2105.00243, section 5.1) and of pFedPM (section V-A).

    Args:
        labels: [n] int.
        num_classes: C.
        clients: N.
        rng: draws n_i, k_i, the classes and the examples.
        writers: unused.
        n: mean number of classes per client.
        k: mean number of examples per class of a client.
        std: standard deviation of n_i and of k_i (classes, examples).

    Raises:
        SettingsError: n exceeds the number of classes, k < 1, std < 0, or a class has too few examples.

    Notes:
        n_i is rounded and clipped to min(2, n)..C; public code also uses at least two classes. It draws classes
        independently; here all classes are used equally often, so that k does not depend on an unlucky draw.
    """
    present = check_classes("partition.n", n, labels, num_classes)
    if k < 1 or not (math.isfinite(std) and std >= 0):
        raise SettingsError(f"n_way_k_shot with k={k}, std={std}: expected k ≥ 1 and std ≥ 0")
    std = abs(std)  # -0.0 is possible
    ways = np.clip(np.rint(rng.normal(n, std, clients)).astype(np.int64), min(2, n), len(present))
    shots = np.maximum(np.rint(rng.normal(k, std, clients)).astype(np.int64), 1)
    held = choose_classes(ways, present, rng)
    counts = np.zeros((clients, num_classes), dtype=np.int64)
    counts[:, : held.shape[1]] = held * shots[:, None]
    available, requested = class_sizes(labels, num_classes), counts.sum(axis=0)
    if (requested > available).any():
        c = int(np.argmax(requested - available))
        holders = int((counts[:, c] > 0).sum())
        raise SettingsError(
            f"n_way_k_shot with k={k}: {holders} of {clients} clients need {requested[c]} examples of class {c}, which "
            f"has {available[c]}; set partition.k to at most {max(int(available[c] // holders - std), 1)}, or use "
            "fewer clients"
        )
    return deal(labels, counts, rng)
