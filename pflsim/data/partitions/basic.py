"""Partitions that do not look at labels: at random, and by who wrote the examples."""

from __future__ import annotations

import numpy as np

from pflsim.errors import SettingsError


def iid(
    labels: np.ndarray, num_classes: int, clients: int, rng: np.random.Generator, writers: np.ndarray | None
) -> list[np.ndarray]:
    """Deal all examples at random in parts whose sizes differ by at most one.

    Args:
        labels: [n] int.
        num_classes: C.
        clients: N.
        rng: shuffles the examples.
        writers: not used.

    Raises:
        SettingsError: more clients than examples.
    """
    if clients > len(labels):
        raise SettingsError(f"clients={clients} is more than the {len(labels)} examples; set clients to at most that")
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


def by_writer(
    labels: np.ndarray,
    num_classes: int,
    clients: int,
    rng: np.random.Generator,
    writers: np.ndarray | None,
    *,
    writers_per_client: int | None = None,
) -> list[np.ndarray]:
    """Give each client all examples of its writers (LEAF's natural partition when that is one writer a client).

    Args:
        labels: [n] int.
        num_classes: C.
        clients: N.
        rng: shuffles the writers.
        writers: [n] int, who wrote each example.
        writers_per_client: writers of each client, the others are left out; None: all writers, in groups whose
            numbers differ by at most one.

    Raises:
        SettingsError: a data set without writers, or too few of them.
    """
    if writers is None:
        raise SettingsError(
            "partition=by_writer needs a data set that knows who wrote each example, this one does not: "
            "use data=femnist, or another partition"
        )
    names = np.unique(writers)
    if writers_per_client is not None and writers_per_client < 1:
        raise SettingsError(f"partition.writers_per_client={writers_per_client} is not at least 1")
    wanted = clients * (writers_per_client or 1)
    if wanted > len(names):
        raise SettingsError(
            f"clients={clients} with {writers_per_client or 1} writer(s) each need {wanted} writers, the data set has "
            f"{len(names)}: set clients to at most {len(names) // (writers_per_client or 1)}"
        )
    shuffled = rng.permutation(names)
    groups = np.array_split(shuffled if writers_per_client is None else shuffled[:wanted], clients)
    return [np.flatnonzero(np.isin(writers, group)) for group in groups]
