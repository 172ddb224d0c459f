"""From a data set, a partition rule and a split rule to the partition of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.data.splits import Assign
from pflsim.errors import SettingsError
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


SplitRule = Callable[[Dataset, Assign, np.random.Generator], Partition]


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
        SettingsError: clients below 1 or above the number of examples, or settings that the rules refuse.
    """
    if clients < 1:
        raise SettingsError(f"clients={clients} is not at least 1")

    def assign(labels: np.ndarray, writers: np.ndarray | None) -> list[np.ndarray]:
        if clients > len(labels):
            raise SettingsError(
                f"clients={clients} is more than the {len(labels)} examples of {dataset.name} that there are to share "
                f"out; set clients to at most {len(labels)}"
            )
        rng = numpy_generator(seed, "partition")
        return _checked(partition_rule(labels, dataset.num_classes, clients, rng, writers), clients, len(labels))

    return split_rule(dataset, assign, numpy_generator(seed, "split"))


def _checked(parts: list[np.ndarray], clients: int, examples: int) -> list[np.ndarray]:
    """Hold a rule, possibly a user's own, to its promise: N parts, none empty, in range, disjoint."""
    if len(parts) != clients:
        raise SettingsError(f"the partition rule returned {len(parts)} parts for {clients} clients")
    for client, rows in enumerate(parts):
        if not len(rows):
            raise SettingsError(f"the partition leaves client {client} without examples; use fewer clients")
    dealt = np.concatenate(parts)
    if dealt.min() < 0 or dealt.max() >= examples or len(np.unique(dealt)) != len(dealt):
        raise SettingsError(f"the partition rule's rows are not distinct numbers in 0..{examples - 1}")
    return parts
