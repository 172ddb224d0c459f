"""Partitions that ignore labels: at random, and by writer."""

from __future__ import annotations

import numpy as np

from pflsim.errors import SettingsError


def iid(
    labels: np.ndarray, num_classes: int, clients: int, rng: np.random.Generator, writers: np.ndarray | None
) -> list[np.ndarray]:
    """Assign all examples at random in parts whose sizes differ by at most one.

    Args:
        labels: [n] int.
        num_classes: C.
        clients: N.
        rng: shuffles the examples.
        writers: unused.

    Raises:
        SettingsError: there are more clients than examples.
    """
    if clients > len(labels):
        raise SettingsError(f"clients={clients} exceeds the {len(labels)} examples; set clients to at most that")
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
    """Give each client all examples of its writers (LEAF's natural partition with one writer per client).

    Args:
        labels: [n] int.
        num_classes: C.
        clients: N.
        rng: shuffles the writers.
        writers: [n] int, the writer of each example.
        writers_per_client: writers per client, other writers are unused; None: all writers in groups of equal size ± 1.

    Raises:
        SettingsError: the data set has no writers, or too few.
    """
    if writers is None:
        raise SettingsError(
            "partition=by_writer needs a data set with the writer of each example: "
            "use data=femnist, or another partition"
        )
    names = np.unique(writers)
    if writers_per_client is not None and writers_per_client < 1:
        raise SettingsError(f"partition.writers_per_client={writers_per_client}: expected at least 1")
    wanted = clients * (writers_per_client or 1)
    if wanted > len(names):
        raise SettingsError(
            f"clients={clients} with {writers_per_client or 1} writer(s) each need {wanted} writers, but there are "
            f"{len(names)}: set clients to at most {len(names) // (writers_per_client or 1)}"
        )
    shuffled = rng.permutation(names)
    groups = np.array_split(shuffled if writers_per_client is None else shuffled[:wanted], clients)
    return [np.flatnonzero(np.isin(writers, group)) for group in groups]
