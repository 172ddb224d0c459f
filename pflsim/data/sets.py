"""Test sets besides a client's own test rows: draws their rows, and copies them into tensors."""

import logging

import numpy as np
import torch

from pflsim.config.settings import Settings
from pflsim.data.content import row_digests
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Examples, Partition, TestSet
from pflsim.seeding import numpy_generator

MAX_GROWTH = 20
"""The factor by which the examples of an evaluation may grow without a warning."""


def drawn(settings: Settings, dataset: Dataset, partition: Partition) -> dict[str, tuple[TestSet, ...]]:
    """Draw the test sets of `eval.sets` for the clients that train. They depend on the rows' content and the seed only.

    `others` has as many rows as the client's own test set, of those of the other clients; `all` has rows of all
    clients, the same for each of them.
    """
    if not settings.eval.sets:
        return {}
    tests = partition.test[: settings.trained]
    rows, owners = np.concatenate(tests), np.repeat(np.arange(len(tests)), [len(own) for own in tests])
    digests = row_digests(dataset, rows)
    pool = TestSet(rows, owners).taken(np.lexsort((digests[:, 1], digests[:, 0])))

    def draw(of: TestSet, size: int, purpose: str, client: int = -1) -> TestSet:
        """Draw rows without replacement, all of them if there are not more."""
        number = len(of.rows)
        chosen = numpy_generator(settings.seed, purpose, client).choice(number, min(size, number), replace=False)
        return of.taken(np.sort(chosen))

    def made(name: str, client: int) -> TestSet:
        return draw(pool.taken(pool.owners != client), len(tests[client]), name, client)

    common = draw(pool, settings.eval.all_examples, "all")
    clients = range(len(tests))
    return {
        name: tuple(common if name == "all" else made(name, client) for client in clients)
        for name in settings.eval.sets
    }


def cost(partition: Partition) -> tuple[int, str]:
    """Return what test sets cost as a message, and its level: a warning above `MAX_GROWTH`."""
    clients = len(next(iter(partition.sets.values())))
    own = sum(map(len, (*partition.test[:clients], *partition.val[:clients])))
    factor = 1 + sum(len(each.rows) for every in partition.sets.values() for each in every) / own
    text = f"eval.sets: an evaluation predicts {factor:.3g} times as many examples"
    if factor <= MAX_GROWTH:
        return logging.INFO, text
    return logging.WARNING, f"{text}; increase eval.every, or lower eval.all_examples"


def examples_of(dataset: Dataset, partition: Partition, own: TestSet) -> Examples:
    """Copy the rows of a test set into tensors, each with the shift of the client that has it."""
    owners = np.unique(own.owners).tolist() or [0]
    back = torch.from_numpy(np.argsort(np.argsort(own.owners, kind="stable")))
    parts = [(partition.shift.of(owner), own.rows[own.owners == owner]) for owner in owners]
    x = torch.cat([change.inputs(dataset, rows) for change, rows in parts])[back]
    y = torch.cat([torch.from_numpy(change.labels(dataset, rows)) for change, rows in parts])[back]
    return Examples(x, y, dataset.scale, dataset.mean, dataset.std)
