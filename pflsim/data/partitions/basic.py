"""Partitions at random, by client, and by the classes of each client."""

from typing import Literal

import numpy as np

from pflsim.config.settings import Count
from pflsim.data.partitions.deal import Pool, apportion, choose_classes, owned, partition_rule
from pflsim.errors import SettingsError


@partition_rule
def iid(pool: Pool) -> list[np.ndarray]:
    """Assign all examples at random in parts whose sizes differ by at most one."""
    return [np.sort(part) for part in np.array_split(pool.rng.permutation(len(pool.labels)), pool.clients)]


@partition_rule
def by_client(pool: Pool, *, ids_per_client: Count | None = None) -> list[np.ndarray]:
    """Give each client all examples of the clients in the data (LEAF's natural partition with one id per client).

    With one id each, the clients are in the order of the ids, which is that of their names.

    Args:
        pool: the examples and the number of clients.
        ids_per_client: ids of the data per client, other ids are unused; None: all ids in groups of equal size ± 1.

    Raises:
        SettingsError: the data set has no client ids, or too few.
    """
    if pool.client_ids is None:
        raise SettingsError(
            "partition=by_client needs a data set with the client of each example: "
            "use data=femnist, Dataset(clients=...) in Python, or another partition"
        )
    names = np.unique(pool.client_ids)
    each = 1 if ids_per_client is None else ids_per_client
    if pool.clients * each > len(names):
        raise SettingsError(
            f"clients={pool.clients} with {each} client(s) of the data each need {pool.clients * each}, but there are "
            f"{len(names)}: set clients to at most {len(names) // each}"
        )
    chosen = pool.rng.permutation(names)[: None if ids_per_client is None else pool.clients * each]
    groups = np.array_split(np.sort(chosen) if len(chosen) == pool.clients else chosen, pool.clients)
    home = np.full(len(names), -1)
    home[np.searchsorted(names, np.concatenate(groups))] = np.repeat(np.arange(pool.clients), [*map(len, groups)])
    return owned(home[np.searchsorted(names, pool.client_ids)], pool.clients)


@partition_rule
def classes_per_client(
    pool: Pool, *, classes: int = 2, balanced: bool = True, assign: Literal["random", "consecutive"] = "random"
) -> list[np.ndarray]:
    """Give each client exactly `classes` classes, all classes equally often ("pathological").

    McMahan et al. 2017 (arXiv:1602.05629) in the form of PFLlib: all examples of a class are divided among the clients
    that hold it.

    Args:
        pool: the examples and the number of clients.
        classes: classes per client.
        balanced: divide a class equally; otherwise in proportion to U(0.1, 1) draws.
        assign: random classes, or consecutive ones, as in most published tables: client 0 has the first ones, client 1
            the next ones, and so on, beginning again after the last class.

    Raises:
        SettingsError: `classes` exceeds the number of classes, or a class has fewer examples than clients that hold it.
    """
    present = pool.check_classes("partition.classes", classes)
    if assign == "consecutive":
        return _divide_classes(pool, _consecutive_classes(pool, present, classes), balanced)
    return _divide_classes(pool, choose_classes(np.full(pool.clients, classes), present, pool.rng), balanced)


@partition_rule
def one_class(pool: Pool) -> list[np.ndarray]:
    """Give client i the single class i mod C (FedALP section 5.1: 100 clients, each digit with ten of them).

    Raises:
        SettingsError: a class has fewer examples than clients that hold it.
    """
    return _divide_classes(pool, _consecutive_classes(pool, pool.check_classes("classes", 1), 1), True)


@partition_rule
def dominant_classes(pool: Pool, *, dominant: int = 2, share: float = 0.6) -> list[np.ndarray]:
    """Give each client all classes, a few of which dominate; all clients have equal sizes (pFedLA, non-IID_2).

    The dominant classes hold a fraction `share` of a client's examples in equal parts, the other classes the rest in
    equal parts. The scarcest class limits the size of clients; further examples are unused.

    Args:
        pool: the examples and the number of clients.
        dominant: dominant classes per client (the paper: 2 of 10, 6 of 100).
        share: fraction of a client's examples in its dominant classes. The paper states none; with 0.6, each of 2
            dominant classes is six times as large as each of 8 others.

    Raises:
        SettingsError: all classes are dominant, `share` does not make them dominate, or there are too few examples for
            all clients to hold all classes.
    """
    present = pool.check_classes("partition.dominant", dominant)
    classes = len(present)
    if dominant == classes or not dominant / classes < share < 1:
        raise SettingsError(
            f"partition.dominant={dominant} of {classes} classes with share={share}: expected dominant < {classes} and "
            "dominant/classes < share < 1"
        )
    held = choose_classes(np.full(pool.clients, dominant), present, pool.rng)[:, present]
    weights = np.where(held, share / dominant, (1 - share) / (classes - dominant))
    size = (pool.sizes[present] / weights.sum(axis=0)).min()
    counts = pool.no_counts
    counts[:, present] = np.floor(weights * size + 1e-9)
    if not counts[:, present].all():
        raise SettingsError(
            f"{pool.clients} clients cannot all hold all {classes} classes: a client would get {size:.1f} examples and "
            f"{weights.min() * size:.2f} of each other class; use fewer clients or a smaller partition.share"
        )
    return pool.deal(counts)


@partition_rule
def listed_classes(pool: Pool, *, held: list[list[int]]) -> list[np.ndarray]:
    """Give client i the classes held[i], with the same number of examples per class and client.

    Use it for federations with known similarities between clients (pFedLA section 4.3).

    Args:
        pool: the examples and the number of clients.
        held: the classes of each of the N clients. The scarcest class limits the examples per class; further examples
            are unused.

    Raises:
        SettingsError: there are not N lists, a list is empty, a class is duplicate or unknown, or a class has fewer
            examples than clients that hold it.
    """
    if len(held) != pool.clients:
        raise SettingsError(f"partition.held lists the classes of {len(held)} clients, but clients={pool.clients}")
    holds = pool.no_counts
    for client, classes in enumerate(held):
        if not classes or len(set(classes)) < len(classes) or not set(classes) <= set(range(pool.num_classes)):
            raise SettingsError(
                f"partition.held: client {client} has {classes}; expected one or more distinct classes, each from 0 to "
                f"{pool.num_classes - 1}"
            )
        holds[client, classes] = 1
    holders = holds.sum(axis=0)
    each = (pool.sizes[holders > 0] // holders[holders > 0]).min()
    return pool.deal(holds * each)


def _consecutive_classes(pool: Pool, present: np.ndarray, classes: int) -> np.ndarray:
    """Return the classes of each client, [N, C] bool: client 0 has the first ones, client 1 the next, and so on."""
    held = pool.no_counts.astype(bool)
    consecutive = np.arange(pool.clients * classes).reshape(pool.clients, classes) % len(present)
    np.put_along_axis(held, present[consecutive], True, axis=1)
    return held


def _divide_classes(pool: Pool, held: np.ndarray, balanced: bool) -> list[np.ndarray]:
    """Divide each class among the clients that hold it ([N, ≤C] bool), with at least one example each."""
    sizes, counts = pool.sizes, pool.no_counts
    for c in range(held.shape[1]):
        holders = np.flatnonzero(held[:, c])
        if len(holders):
            weights = np.ones(len(holders)) if balanced else pool.rng.uniform(0.1, 1.0, len(holders))
            counts[holders, c] = 1 + apportion(weights, max(int(sizes[c]) - len(holders), 0))
    return pool.deal(counts)
