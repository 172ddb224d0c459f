"""From a data set, a partition rule and a split rule to the partition of a run."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.data.splits import Assign
from pflsim.errors import SettingsError
from pflsim.memory import check_room
from pflsim.seeding import numpy_generator


class PartitionRule(Protocol):
    """`rule(labels, num_classes, clients, rng, writers)` with its settings already filled in."""

    def __call__(
        self,
        labels: np.ndarray,
        num_classes: int,
        clients: int,
        rng: np.random.Generator,
        writers: np.ndarray | None,
        /,
    ) -> list[np.ndarray]:
        """Row numbers per client, disjoint."""
        ...


class SplitRule(Protocol):
    """`split(dataset, assign, rng)` with its settings already filled in."""

    def __call__(self, dataset: Dataset, assign: Assign, rng: np.random.Generator, /) -> Partition:
        """What every client trains, validates and is tested on."""
        ...


def federate(
    dataset: Dataset, partition_rule: PartitionRule, split_rule: SplitRule, clients: int, seed: int
) -> Partition:
    """Decide which client holds which examples: a function of the examples, the two rules and the seed.

    Args:
        dataset: the data set.
        partition_rule: which client gets which examples, e.g. `functools.partial(dirichlet, alpha=0.1)`.
        split_rule: what a client trains and is tested on, e.g. `functools.partial(merged, fraction=0.75)`.
        clients: N.
        seed: the run's seed; the purposes "partition" and "split" have streams of their own.

    Raises:
        SettingsError: clients below 1 or above the number of examples, settings that the rules refuse, or rules that do
            not do what they promise.
    """
    if clients < 1:
        raise SettingsError(f"clients={clients} is not at least 1")

    def assign(labels: np.ndarray, writers: np.ndarray | None) -> list[np.ndarray]:
        if clients > len(labels):
            raise SettingsError(
                f"clients={clients} is more than the {len(labels)} examples of {dataset.name} that there are to share "
                f"out; set clients to at most {len(labels)}"
            )
        what = f"clients={clients} and {dataset.num_classes} classes: who holds how many of each"
        check_room(what, 3 * 8 * clients * dataset.num_classes, "use fewer clients")
        rng = numpy_generator(seed, "partition")
        return _checked(partition_rule(labels, dataset.num_classes, clients, rng, writers), clients, len(labels))

    return _whole(split_rule(dataset, assign, numpy_generator(seed, "split")), clients, len(dataset.y))


def _whole(partition: Partition, clients: int, examples: int) -> Partition:
    """Hold a split rule, possibly a user's own, to its promise: rows of N clients, in range, and some to train on."""
    if not isinstance(partition, Partition):
        raise SettingsError(f"the split rule returned a {type(partition).__name__}, expected a Partition")
    for name in ("train", "val", "test"):
        parts = getattr(partition, name)
        if len(parts) != clients:
            raise SettingsError(f"the split rule returned {name} rows of {len(parts)} clients, expected {clients}")
        for client, rows in enumerate(parts):
            if not _are_rows(rows, examples):
                raise SettingsError(
                    f"the split rule's {name} rows of client {client} are not numbers 0..{examples - 1}"
                )
    empty = [client for client, rows in enumerate(partition.train) if not len(rows)]
    if empty:
        raise SettingsError(f"the split leaves client {empty[0]} without training examples; use fewer clients")
    return partition


def _are_rows(rows: object, examples: int) -> bool:
    if not isinstance(rows, np.ndarray) or rows.ndim != 1 or not (len(rows) == 0 or rows.dtype.kind in "iu"):
        return False
    return len(rows) == 0 or (int(rows.min()) >= 0 and int(rows.max()) < examples)


def _checked(parts: list[np.ndarray], clients: int, examples: int) -> list[np.ndarray]:
    """Hold a partition rule, possibly a user's own, to its promise: N parts, none empty, in range, disjoint."""
    if not isinstance(parts, list | tuple) or not all(_are_rows(rows, examples) for rows in parts):
        raise SettingsError(
            f"the partition rule's rows are not distinct numbers in 0..{examples - 1}, an array a client"
        )
    if len(parts) != clients:
        raise SettingsError(f"the partition rule returned {len(parts)} parts for {clients} clients")
    for client, rows in enumerate(parts):
        if not len(rows):
            raise SettingsError(f"the partition leaves client {client} without examples; use fewer clients")
    dealt = np.concatenate(parts)
    if len(np.unique(dealt)) != len(dealt):
        raise SettingsError(f"the partition rule's rows are not distinct numbers in 0..{examples - 1}")
    return parts
