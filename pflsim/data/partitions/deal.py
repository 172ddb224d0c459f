"""Helpers of the partition rules: apportionment, choice of classes, and drawing rows by class counts."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np

from pflsim.config.validate import Width
from pflsim.data.dataset import BINS
from pflsim.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Pool:
    """The arguments of a partition rule.

    Args:
        labels: [n] int, the labels of the examples to assign.
        num_classes: C.
        clients: N.
        rng: for all random choices.
        client_ids: [n] int, the client in the data of each example; None if unknown.
    """

    labels: np.ndarray
    num_classes: int
    clients: int
    rng: np.random.Generator
    client_ids: np.ndarray | None

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of examples per class, [C] int64."""
        return np.bincount(self.labels, minlength=self.num_classes)

    @property
    def no_counts(self) -> np.ndarray:
        """Return zeros [N, C] int64."""
        return np.zeros((self.clients, self.num_classes), dtype=np.int64)

    def deal(self, counts: np.ndarray) -> list[np.ndarray]:
        """Draw counts[i, c] rows of class c for each client i, see `deal`."""
        return deal(self.labels, counts, self.rng)

    def check_classes(self, name: str, value: int) -> np.ndarray:
        """Return the classes that have examples, after checking that a client can hold `value` of them.

        Raises:
            SettingsError: `value` is below 1 or above the number of classes.
        """
        present = np.flatnonzero(self.sizes)
        if not 1 <= value <= len(present):
            classes = f"{len(present)} classes, the number of classes in the data set"
            raise SettingsError(f"{name}={value}: expected 1 to {classes}")
        return present


def partition_rule(rule: Callable[..., list[np.ndarray]]) -> Callable[..., list[np.ndarray]]:
    """Make `rule(pool, *, settings)` a rule `rule(labels, num_classes, clients, rng, client_ids, *, settings)`.

    It gets labels and client ids in content order (see `pflsim.data.content`), so the partition does not depend on the
    stored order of rows. Rules without this decorator get the stored order, so that the numbers they return are the
    user's row numbers.
    """

    @wraps(rule)
    def call(*given: Any, bins: int = BINS, **settings: Any) -> list[np.ndarray]:
        del bins  # `load_federation` has made classes of the targets
        return rule(Pool(*given), **settings)

    signature, shared = inspect.signature(rule, eval_str=True), inspect.signature(Pool, eval_str=True)
    bins = inspect.Parameter("bins", inspect.Parameter.KEYWORD_ONLY, default=BINS, annotation=Width)
    settings = [*[*signature.parameters.values()][1:], bins]
    vars(call)["__signature__"] = signature.replace(parameters=[*shared.parameters.values(), *settings])
    vars(call)["in_content_order"] = True
    return call


def apportion(weights: np.ndarray, total: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Divide `total` items in proportion to weights, by largest remainder.

    Integer weights give exact results, and no part exceeds its weight if total ≤ sum of weights.

    Args:
        weights: [m] non-negative, not all zero unless total is 0.
        total: the number of items.
        rng: breaks ties between equal remainders; None: the first wins.

    Returns:
        [m] int64 with sum `total`.
    """
    weights = np.asarray(weights)
    whole = weights.sum()
    if total == 0 or whole == 0:
        return np.zeros(len(weights), dtype=np.int64)
    if np.issubdtype(weights.dtype, np.integer):
        parts, remainder = np.divmod(weights.astype(np.int64) * total, int(whole))
    else:
        quota = weights / whole * total
        parts = np.floor(quota).astype(np.int64)
        remainder = np.where(weights > 0, quota - parts, -1.0)
    ties = rng.random(len(weights)) if rng is not None else np.arange(len(weights))
    parts[np.lexsort((ties, -remainder))[: total - int(parts.sum())]] += 1
    return parts


def deal(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw rows without replacement so that client i receives counts[i, c] rows of class c.

    Args:
        labels: [n] int.
        counts: [N, C] int.
        rng: shuffles each class.

    Returns:
        N arrays of row numbers, disjoint, each ascending.

    Raises:
        SettingsError: a class has fewer rows.
    """
    owners = np.full(len(labels), -1)
    for c, wanted in enumerate(counts.T):
        rows, total = rng.permutation(np.flatnonzero(labels == c)), wanted.sum()
        if total > len(rows):
            raise SettingsError(
                f"partition: class {c} has {len(rows)} examples, but {np.count_nonzero(wanted)} clients would get "
                f"{total} of them; use fewer clients, or fewer classes or examples per client"
            )
        owners[rows[:total]] = np.repeat(np.arange(len(counts)), wanted)
    return owned(owners, len(counts))


def owned(owners: np.ndarray, clients: int) -> list[np.ndarray]:
    """Return the rows of each client, ascending, from the owner of each row; −1: none."""
    order = owners.argsort(kind="stable")
    return np.split(order, np.searchsorted(owners[order], np.arange(clients + 1)))[1:-1]


def choose_classes(how_many: np.ndarray, present: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Choose distinct random classes for each client, all classes equally often (± 1).

    Clients choose in turn from the classes with the largest remaining quota, ties at random. Each class is used if
    there are at least as many choices as classes.

    Args:
        how_many: [N] int, classes per client, 1 to len(present).
        present: [P] int, the classes to choose from.
        rng: breaks ties.

    Returns:
        [N, max(present) + 1] bool, the classes of each client.
    """
    slots = int(how_many.sum())
    quotas = np.full(len(present), slots // len(present))
    quotas[rng.permutation(len(present))[: slots % len(present)]] += 1
    chosen = np.zeros((len(how_many), int(present.max()) + 1), dtype=bool)
    order = rng.permutation(len(how_many))
    for client in order[np.argsort(-how_many[order], kind="stable")]:
        picks = np.lexsort((rng.random(len(present)), -quotas))[: how_many[client]]
        quotas[picks] -= 1
        chosen[client, present[picks]] = True
    return chosen
