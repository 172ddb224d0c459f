"""A few labels per client and widely differing sizes: the rule of FedProx's, Ditto's and pFedMe's generators."""

from __future__ import annotations

import math

import numpy as np

from pflsim.data.partitions.deal import apportion, check_classes, class_sizes, deal
from pflsim.errors import SettingsError


def label_lognormal(
    labels: np.ndarray,
    num_classes: int,
    clients: int,
    rng: np.random.Generator,
    writers: np.ndarray | None,
    *,
    classes: int = 2,
    median: float = 400.0,
    sigma: float = 0.7,
    smallest: int = 100,
    largest: int = 1600,
) -> list[np.ndarray]:
    """Give client i the labels (i + j) mod C, j < classes, in equal parts, and a lognormal number of examples.

    The size of client i is `exp(N(ln median, sigma²))`, held within smallest..largest. The defaults put 95% of the
    draws between 100 and 1,600, the sizes that the papers report for 20 clients on MNIST.

    Args:
        labels: [n] int.
        num_classes: C; classes without examples are passed over.
        clients: N.
        rng: draws sizes and examples.
        writers: not used.
        classes: labels of each client.
        median: median number of examples of a client.
        sigma: standard deviation of the logarithm of the size.
        smallest: examples that every client has at least, before scaling.
        largest: examples that a client has at most, before scaling.

    Raises:
        SettingsError: settings out of range, or too few examples for every client to have one of each of its labels.

    Notes:
        When the clients of some label ask for more than there is of it, all sizes are scaled down by one common factor,
        so that a small data set gets the same shape. What is not asked for goes unused. The generators draw a factor
        per client and label with σ = 2 and no bounds, and differ among themselves; equal parts keep a client at
        `classes` labels of comparable weight.
    """
    present = check_classes("partition.classes", classes, labels, num_classes)
    if not (0 < median < math.inf and 0 <= sigma < math.inf and classes <= smallest <= largest):
        raise SettingsError(
            f"label_lognormal with median={median}, sigma={sigma}, smallest={smallest}, largest={largest}: needs "
            f"median > 0, sigma ≥ 0 and {classes} (the classes) ≤ smallest ≤ largest"
        )
    sizes = np.clip(np.exp(rng.normal(math.log(median), abs(sigma), clients)), smallest, largest)
    held = present[(np.arange(clients)[:, None] + np.arange(classes)) % len(present)]  # [N, classes]
    asked = np.zeros((clients, num_classes), dtype=np.int64)
    for client, size in enumerate(sizes):
        asked[client, held[client]] = apportion(np.ones(classes), int(size))
    return deal(labels, _fit(asked, class_sizes(labels, num_classes)), rng)


def _fit(asked: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Scale counts [N, C] by one factor until every class has enough, with at least one wherever one was asked."""
    total, holders = asked.sum(axis=0), (asked > 0).sum(axis=0)
    if (holders > there).any():
        c = int(np.argmax(holders - there))
        raise SettingsError(
            f"label_lognormal: {holders[c]} of {len(asked)} clients hold label {c}, which has only {there[c]} "
            "examples; use fewer clients or fewer partition.classes"
        )
    short = total > there
    if not short.any():
        return asked
    # One example is set aside for each holder, the rest of the class is scaled: floors then never exceed what is there.
    factor = ((there - holders)[short] / (total - holders)[short]).min()
    return np.where(asked > 0, 1 + np.floor((asked - 1) * factor).astype(np.int64), 0)
