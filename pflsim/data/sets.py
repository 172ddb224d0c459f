"""Test sets besides a client's own test rows: draws their rows, and copies them into tensors."""

import logging
from dataclasses import replace

import numpy as np
import torch

from pflsim.config.settings import Settings
from pflsim.data.content import row_digests
from pflsim.data.corruptions import Corruptor, fitting
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Examples, Partition, TestSet, scaled
from pflsim.seeding import numpy_generator

MAX_GROWTH = 20
"""The factor by which the examples of an evaluation may grow without a warning."""
FIELDS = ("rows", "owners", "corruptions")
"""Of a test set, those with a value for each row."""


def drawn(settings: Settings, dataset: Dataset, partition: Partition) -> dict[str, tuple[TestSet, ...]]:
    """Draw the test sets of `eval.sets` for the clients that train. They depend on the rows' content and the seed only.

    `others` has as many rows as the client's own test set, of those of the other clients; `all` has rows of all
    clients, the same for each of them. `corrupted` are the client's own rows, each with a corruption that its content
    decides, and `mixture` as many of these, of the own ones and of `others`.

    Raises:
        SettingsError: the data do not fit a corruption.
    """
    asked, names = settings.eval, dict[str, tuple[str, ...]]()
    if not asked.sets:
        return {}
    for name in asked.sets:
        if name not in ("others", "all"):
            names[name] = (name,) if name in (fits := fitting(dataset, name)) else fits
    tests = partition.test[: settings.trained]
    rows, owners = np.concatenate(tests), np.repeat(np.arange(len(tests)), [len(own) for own in tests])
    digests = row_digests(dataset, rows)
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    pool, digests = TestSet(rows[order], owners[order], np.full(len(rows), "", "U16")), digests[order]
    corruptor = _corruptor(settings, dataset, partition) if names else None

    def draw(of: TestSet, size: int, purpose: str, client: int = -1) -> TestSet:
        """Draw rows without replacement, all of them if there are not more."""
        number = len(of.rows)
        chosen = numpy_generator(settings.seed, purpose, client).choice(number, min(size, number), replace=False)
        return of.taken(np.sort(chosen))

    def made(name: str, client: int) -> TestSet:
        size, own = len(tests[client]), pool.owners == client
        others = draw(pool.taken(~own), size, "others", client)
        if name == "others":
            return others
        kinds = np.array(names[name])
        how = kinds[digests[own, 0] % np.uint64(len(kinds))]
        corrupted = replace(pool.taken(own), corruptions=how, corruptor=corruptor)
        if name != "mixture":
            return corrupted
        parts = pool.taken(own), others, corrupted
        rows, owners, how = (np.concatenate([getattr(part, key) for part in parts]) for key in FIELDS)
        return draw(TestSet(rows, owners, how, corruptor), size, name, client)

    common = draw(pool, asked.all_examples, "all")
    clients = range(len(tests))
    return {name: tuple(common if name == "all" else made(name, c) for c in clients) for name in asked.sets}


def _corruptor(settings: Settings, dataset: Dataset, partition: Partition) -> Corruptor:
    """Return what corrupts rows; means and deviations of a table are those of training rows, see `Partition.common`."""
    x = dataset.x[np.concatenate(partition.common) if dataset.kind == "tables" else []].astype(np.float64)
    x = x / dataset.scale if dataset.x.dtype == np.uint8 else x
    mean, std = (x.mean(0), x.std(0)) if len(x) else (x, x)
    return Corruptor(settings.eval.severity, settings.seed, mean, std)


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
    """Copy the rows of a test set into tensors, each with the shift of the client that has it, then corrupted."""
    owners = np.unique(own.owners).tolist() or [0]
    back = torch.from_numpy(np.argsort(np.argsort(own.owners, kind="stable")))
    parts = [(partition.shift.of(owner), own.rows[own.owners == owner]) for owner in owners]
    x = torch.cat([change.inputs(dataset, rows) for change, rows in parts])[back]
    y = torch.cat([torch.from_numpy(change.labels(dataset, rows)) for change, rows in parts])[back]
    if own.corruptor:
        x = scaled(x, dataset.scale, None, None)
        each = zip(own.corruptions.tolist(), own.owners.tolist(), row_digests(dataset, own.rows), strict=True)
        for at, (name, owner, digest) in enumerate(each):
            if name:
                x[at] = torch.from_numpy(own.corruptor(name, x[at].numpy(), digest.tobytes().hex(), owner))
    return Examples(x, y, dataset.scale, dataset.mean, dataset.std)
