"""Partitions that ignore labels: at random, and by writer."""

from __future__ import annotations

import numpy as np

from pflsim.config.validate import at_least_one
from pflsim.data.partitions.deal import in_content_order
from pflsim.errors import SettingsError


@in_content_order
def iid(
    labels: np.ndarray, num_classes: int, clients: int, rng: np.random.Generator, writers: np.ndarray | None
) -> list[np.ndarray]:
    """Assign all examples at random in parts whose sizes differ by at most one.

    Args:
        labels: [n] int.
        num_classes: C.
        clients: N, at most n.
        rng: shuffles the examples.
        writers: unused.
    """
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


@in_content_order
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
    each = 1 if writers_per_client is None else at_least_one("partition.writers_per_client", writers_per_client)
    if clients * each > len(names):
        raise SettingsError(
            f"clients={clients} with {each} writer(s) each need {clients * each} writers, but there are "
            f"{len(names)}: set clients to at most {len(names) // each}"
        )
    shuffled = rng.permutation(names)
    groups = np.array_split(shuffled if writers_per_client is None else shuffled[: clients * each], clients)
    return [np.flatnonzero(np.isin(writers, group)) for group in groups]
