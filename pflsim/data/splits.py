"""Split rules: select the training, validation and test examples of each client.

A rule is `split(dataset, assign, rng, *, settings) -> Partition`. `assign(rows)` applies the partition rule to rows of
the data set and returns those of each client. The rules here pass rows in content order: a client's examples do not
depend on the stored order.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.random import Generator

from pflsim.config.settings import Count
from pflsim.config.validate import Chance, Share
from pflsim.data.content import content_order
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.data.partitions.deal import apportion, deal
from pflsim.errors import SettingsError

Assign = Callable[[np.ndarray], list[np.ndarray]]
Pair = tuple[np.ndarray, np.ndarray]
"""Two parts of a client's rows."""
TestBy = Literal["labels", "clients"]


def official(
    dataset: Dataset,
    assign: Assign,
    rng: Generator,
    *,
    validation: Chance = 0.1,
    test_by: TestBy = "labels",
    stratify: bool = True,
) -> Partition:
    """Partition the official training part; draw each client's test examples from the official test part.

    Args:
        dataset: the data set.
        assign: the partition rule.
        rng: draws test and validation examples.
        validation: fraction of a client's training examples for validation, in [0, 1).
        test_by: "labels": disjoint test sets with each client's label distribution (see
            `pflsim.data.splits.own_test_counts`); "clients": the test examples of the same
            clients in the data.
        stratify: draw validation examples in proportion to each client's labels; false: at random.

    Returns:
        The partition. Each client has at least one training and one test example.

    Raises:
        SettingsError: a setting is out of range, or a client has no test example.

    Notes:
        With partition=by_client, test_by=labels ignores clients, so most test examples are from other clients.
        Use test_by=clients or split=merged instead. The label shares of test_by=labels are those of the training
        examples, so with few examples per client it favours personal models.
    """
    _check_groups(dataset, "split=official")
    pool = assign(content_order(dataset, 0, dataset.train_size))
    tests = content_order(dataset, dataset.train_size)
    if test_by == "clients":
        test = _tests_by_client(dataset, pool, tests)
    else:
        held = np.stack([np.bincount(dataset.y[rows], minlength=dataset.num_classes) for rows in pool])
        counts = own_test_counts(held, np.bincount(dataset.y[tests], minlength=dataset.num_classes), rng)
        test = [tests[part] for part in deal(dataset.y[tests], counts, rng)]
    return _finish(dataset, [*zip(pool, test, strict=True)], validation, stratify, rng)


def merged(
    dataset: Dataset,
    assign: Assign,
    rng: Generator,
    *,
    fraction: Share = 0.75,
    validation: Chance = 0.1,
    stratify: bool = False,
) -> Partition:
    """Partition all examples, then split each client's examples into a training and a test part.

    Args:
        dataset: the data set; its official parts are ignored.
        assign: the partition rule.
        rng: draws test and validation examples.
        fraction: fraction of a client's examples for training, in (0, 1).
        validation: fraction of the training part for validation, in [0, 1).
        stratify: draw test and validation examples in proportion to each client's labels, which tells personal
            models the label shares of the test part; false: at random.

    Raises:
        SettingsError: a setting is out of range, or a client has a single example.
    """
    parts, sides = [], dict[int, bool]()
    if stratify:
        _check_groups(dataset, "split.stratify=true")
    for client, rows in enumerate(assign(content_order(dataset))):
        if len(rows) < 2:
            raise SettingsError(
                f"client {client} has {len(rows)} example, but splitting needs at least 2: use fewer clients, "
                "or a partition with more examples per client (dirichlet: increase partition.min_examples)"
            )
        tested = min(max(len(rows) - int(fraction * len(rows) + 0.5), 1), len(rows) - 1)
        train, test = _divided(dataset, rows, tested, stratify, rng, sides)
        if not len(train) or not len(test):
            raise SettingsError(
                f"client {client}: its {len(rows)} rows are of one group of data.group, or of groups that other "
                "clients have on one side; increase data.min_examples, or leave data.group out"
            )
        parts.append((train, test))
    return _finish(dataset, parts, validation, stratify, rng)


def counts(
    dataset: Dataset,
    assign: Assign,
    rng: Generator,
    *,
    train: Count = 500,
    test: Count = 100,
    validation: Chance = 0.1,
    stratify: bool = False,
) -> Partition:
    """Partition all examples, then draw a fixed number of each client's.

    Args:
        dataset: the data set; its official parts are ignored.
        assign: the partition rule.
        rng: draws the examples.
        train: training examples per client, including validation.
        test: test examples per client.
        validation: fraction of the training examples for validation, in [0, 1).
        stratify: as in `merged`; also the examples that are used.

    Raises:
        SettingsError: a setting is out of range, or a client has fewer than train + test examples.
    """
    _check_groups(dataset, "split=counts")
    parts = []
    for client, rows in enumerate(assign(content_order(dataset))):
        if len(rows) < train + test:
            raise SettingsError(
                f"split=counts needs train + test = {train + test} examples per client, but client {client} has "
                f"{len(rows)}; use fewer clients, or smaller split.train and split.test"
            )
        _, kept = _divided(dataset, rows, train + test, stratify, rng)
        parts.append(_divided(dataset, kept, test, stratify, rng))
    return _finish(dataset, parts, validation, stratify, rng)


def copies_labels(split: Mapping[str, Any]) -> bool:
    """Return whether test examples have the label shares of each client's training examples, by the component `split`.

    A model of a client then knows the label shares of its test examples. On clients without any difference that makes
    personal models better, the more the fewer examples they have.
    """
    return split.get("test_by", "labels" if split.get("stratify") else "") == "labels"


def _check_groups(dataset: Dataset, what: str) -> None:
    if dataset.groups is not None:
        raise SettingsError(f"{what}: rows of a group of data.group cannot stay together; use split=merged alone")


def _tests_by_client(dataset: Dataset, pool: list[np.ndarray], tests: np.ndarray) -> list[np.ndarray]:
    """Return the test rows of each client's ids in the data; the first client that holds an id gets its test rows."""
    ids = dataset.clients
    if ids is None:
        raise SettingsError("split.test_by=clients needs a data set with clients (data=femnist); use test_by=labels")
    owner: dict[int, int] = {}
    for client, rows in enumerate(pool):
        owner = dict.fromkeys(ids[rows].tolist(), client) | owner
    owners = np.array([owner.get(each, -1) for each in ids[tests].tolist()])
    for client in range(len(pool)):
        if client not in owners:
            own = {*ids[pool[client]].tolist()} if dataset.client_names else ()
            name = f"client {', '.join(dataset.client_names[each] for each in own) or client}"
            lacking = f"{name} has no example in the official test part"
            raise SettingsError(f"split.test_by=clients: {lacking}; use split=merged")
    return [tests[owners == client] for client in range(len(pool))]


def _divided(
    dataset: Dataset, rows: np.ndarray, size: int, stratify: bool, rng: Generator, sides: dict[int, bool] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Choose `size` of the rows; return the others and these, in the given order.

    If the data set has groups, whole groups are chosen until they have `size` rows, but not all of them.

    Args:
        dataset: the data set.
        rows: of a client.
        size: their number.
        stratify: choose them in proportion to their classes.
        rng: draws them.
        sides: whether groups are chosen, by group, as they were for earlier clients; those of this client are added.
    """
    if dataset.groups is None:
        labels = dataset.y[rows] if stratify else np.zeros(len(rows), np.int64)
        wanted = apportion(np.bincount(labels, minlength=dataset.num_classes), size, rng)
        (chosen,) = deal(labels, wanted[None], rng)
        return np.delete(rows, chosen), rows[chosen]
    sides = {} if sides is None else sides
    groups, sizes = np.unique(dataset.groups[rows], return_counts=True)
    order = rng.permutation(len(groups))
    order = order[np.argsort([groups[i] not in sides for i in order], kind="stable")]  # those with a side come first
    total, left = 0, len(rows)
    for group, count in zip(groups[order].tolist(), sizes[order].tolist(), strict=True):
        chosen = sides.setdefault(group, total < size and count < left)
        total, left = total + count * chosen, left - count * chosen
    is_chosen = np.array([sides[group] for group in dataset.groups[rows].tolist()])
    return rows[~is_chosen], rows[is_chosen]


def _finish(dataset: Dataset, parts: Sequence[Pair], validation: float, stratify: bool, rng: Generator) -> Partition:
    """Draw validation rows from the training rows of each pair of training and test rows, and sort all rows.

    Clients of two or more rows get at least one if validation > 0.
    """
    train, test = zip(*parts, strict=True)
    drawn, sides = list[Pair](), dict[int, bool]()
    for rows in train:
        size = min(max(int(validation * len(rows) + 0.5), 1), len(rows) - 1) if validation > 0 else 0
        drawn.append(_divided(dataset, rows, size, stratify, rng, sides))
    kept, val = zip(*drawn, strict=True)
    return Partition(tuple(map(np.sort, kept)), tuple(map(np.sort, val)), tuple(map(np.sort, test)))


def own_test_counts(held: np.ndarray, available: np.ndarray, rng: Generator) -> np.ndarray:
    """Return the number of test examples per client and class, close to each client's own label distribution.

    Client i has D_ij training examples of class j; T_j test examples of class j exist. Each client receives about
    `rho · D_ij` examples, with `rho = min_j T_j / Σ_i D_ij` over the classes that have both. Quotas are rounded down.
    The remaining examples of a class go to the clients with the largest accumulated rounding loss.
    A client with no test example then receives one of a class it holds, if necessary from another client.

    Args:
        held: [N, C] int, the D_ij.
        available: [C] int, the T_j.
        rng: breaks ties between clients.

    Returns:
        [N, C] int. Column sums are at most T_j, entries are zero where D_ij is zero, and every row sum is at least 1.

    Raises:
        SettingsError: a client gets no test example.
    """
    totals = held.sum(axis=0)
    usable = np.flatnonzero((totals > 0) & (available > 0))
    counts = np.zeros_like(held)
    if len(usable):
        rho = min(Fraction(int(available[j]), int(totals[j])) for j in usable)
        deficit = np.zeros(len(held))
        for j in usable:
            deficit = _round_fairly(counts, held, int(j), int(rho * int(totals[j])), deficit, rng)
    for client in np.flatnonzero(counts.sum(axis=1) == 0):
        if not _give_one(counts, held, available, int(client)):
            raise SettingsError(
                f"split=official: no test example of its own classes is left for client {client}: {len(held)} clients "
                f"share {available.sum()} official test examples; use fewer clients, or split=merged"
            )
    return counts


def _round_fairly(
    counts: np.ndarray, held: np.ndarray, j: int, total: int, deficit: np.ndarray, rng: Generator
) -> np.ndarray:
    """Distribute `total` examples of class j in proportion to held[:, j], in place; return the accumulated losses.

    Each client receives its quota rounded down. The remaining examples go to the clients with the largest accumulated
    rounding loss. Largest remainders per class would favour the same clients in every class if many quotas are equal.
    """
    weights, whole = held[:, j].astype(np.int64), int(held[:, j].sum())
    counts[:, j], remainder = np.divmod(weights * total, whole)
    deficits = deficit + remainder / whole
    candidates = np.flatnonzero(remainder)
    order = candidates[np.lexsort((rng.random(len(candidates)), -deficits[candidates].round(9)))]
    receivers = order[: total - int(counts[:, j].sum())]
    counts[receivers, j] += 1
    deficits[receivers] -= 1
    return deficits


def _give_one(counts: np.ndarray, held: np.ndarray, available: np.ndarray, client: int) -> bool:
    """Give a client one more test example, in place: an unused one, or one of a client that has several."""
    own, sizes = np.argsort(-held[client], kind="stable")[: np.count_nonzero(held[client])], counts.sum(axis=1)
    for j in own:
        if counts[:, j].sum() < available[j]:
            counts[client, j] += 1
            return True
    for j in own:
        donor = int(np.argmax(np.where(counts[:, j] > 0, sizes, 0)))
        if counts[donor, j] > 0 and sizes[donor] > 1:
            counts[[donor, client], j] += -1, 1
            return True
    return False
