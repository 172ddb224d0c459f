"""A few labels per client and random sizes: lognormal as in FedProx, Ditto and pFedMe, or normal as in FedProto."""

import math

import numpy as np

from pflsim.config.settings import Count
from pflsim.config.validate import NonNegative, Positive
from pflsim.data.partitions.deal import Pool, apportion, choose_classes, partition_rule
from pflsim.errors import SettingsError


@partition_rule
def label_lognormal(
    pool: Pool,
    *,
    classes: int = 2,
    median: Positive = 400.0,
    sigma: NonNegative = 0.7,
    smallest: int = 100,
    largest: int = 1600,
) -> list[np.ndarray]:
    """Give client i the labels (i + j) mod C, j < classes, in equal parts, and a lognormal number of examples.

    The size of client i is `exp(N(ln median, sigma²))`, clipped to smallest..largest. With the defaults, 95% of the
    draws lie between 100 and 1,600, the sizes that the papers report for 20 clients on MNIST.

    Args:
        pool: the examples and the number of clients.
        classes: labels per client.
        median: median number of examples per client.
        sigma: standard deviation of the logarithm of the size.
        smallest: minimum number of examples per client, before scaling.
        largest: maximum number of examples per client, before scaling.

    Raises:
        SettingsError: a setting is out of range, or a label has fewer examples than clients that hold it.

    Notes:
        If a label has too few examples, all sizes are scaled down by one common factor. Other examples are unused. The
        original generators draw a factor per client and label with σ = 2 and no bounds, and differ from each other.
        Equal parts give a client's labels comparable weights.
    """
    present = pool.check_classes("partition.classes", classes)
    if not classes <= smallest <= largest:
        raise SettingsError(
            f"partition.smallest={smallest}, largest={largest}: expected classes={classes} ≤ smallest ≤ largest"
        )
    with np.errstate(over="ignore"):  # a size beyond all numbers is cut to `largest`
        sizes = np.clip(np.exp(pool.rng.normal(math.log(median), abs(sigma), pool.clients)), smallest, largest)
    held = present[(np.arange(pool.clients)[:, None] + np.arange(classes)) % len(present)]  # [N, classes]
    requested = pool.no_counts
    for client, size in enumerate(sizes):
        requested[client, held[client]] = apportion(np.ones(classes), int(size))
    return pool.deal(_scale_to_fit(requested, pool.sizes))


def _scale_to_fit(requested: np.ndarray, available: np.ndarray) -> np.ndarray:
    """Scale counts [N, C] by one factor until each class suffices, and keep at least one where one was requested."""
    total, holders = requested.sum(axis=0), (requested > 0).sum(axis=0)
    short = total > available
    if not short.any():
        return requested
    # Reserve one example per holder and scale the rest, so that the floors never exceed the available examples.
    factor = (np.maximum(available - holders, 0)[short] / np.maximum(total - holders, 1)[short]).min()
    return np.where(requested > 0, 1 + np.floor((requested - 1) * factor).astype(np.int64), 0)


@partition_rule
def n_way_k_shot(
    pool: Pool, *, n: int = 3, k: Count = 100, std: NonNegative = 2.0, even: bool = False
) -> list[np.ndarray]:
    """Give client i n_i classes with k_i examples each; n_i and k_i are normal around n and k with deviation `std`.

    The heterogeneity of FedProto (Tan et al. 2022, arXiv:2105.00243, section 5.1) and of pFedPM (section V-A).

    Args:
        pool: the examples and the number of clients.
        n: mean number of classes per client.
        k: mean number of examples per class of a client.
        std: standard deviation of n_i and of k_i (classes, examples).
        even: use all classes equally often; otherwise each client draws its classes independently, as FedProto does.

    Raises:
        SettingsError: n exceeds the number of classes, k < 1, std < 0, or a class has too few examples.

    Notes:
        n_i is rounded and clipped to min(2, n)..C; public code also uses at least two classes. With `even` and many
        classes, clients may have no class in common.
    """
    present = pool.check_classes("partition.n", n)
    std = abs(std)  # -0.0 is possible
    ways = np.clip(np.rint(pool.rng.normal(n, std, pool.clients)).astype(np.int64), min(2, n), len(present))
    shots = np.maximum(np.rint(pool.rng.normal(k, std, pool.clients)).astype(np.int64), 1)
    held = pool.no_counts.astype(bool)
    if even:
        chosen = choose_classes(ways, present, pool.rng)
        held[:, : chosen.shape[1]] = chosen
    else:
        for client, way in enumerate(ways):
            held[client, pool.rng.choice(present, way, replace=False)] = True
    return pool.deal(held * shots[:, None])
