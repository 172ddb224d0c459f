"""What the counts of a round say: accuracy over clients, and losses over participants. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from pflsim.types import EvalRow, Split, TrainReport

Model = Literal["personal", "global"]
Phase = Literal["received", "trained"]


class Scope(NamedTuple):
    """What a figure is about: which model, on which split, at which point of the round."""

    model: Model
    split: Split
    phase: Phase


SCOPES: tuple[Scope, ...] = tuple(
    Scope(model, split, phase) for model in get_args(Model) for split in get_args(Split) for phase in get_args(Phase)
)
"""Every scope there can be, in the order in which they are written."""


@dataclass(frozen=True, slots=True)
class AccuracyStats:
    """Accuracy over clients. A client's rate is correct / total; clients with no example of the split do not count.

    Args:
        clients: how many clients count.
        mean: unweighted mean of the clients' rates: every client matters the same.
        weighted_mean: Σ correct / Σ total: every example matters the same.
        std: population standard deviation of the rates.
        median: median of the rates.
        worst_decile: mean rate of the ⌈clients / 10⌉ clients with the lowest rates (so of at least one).
        best_decile: the same of those with the highest rates.
        loss: unweighted mean over clients of the mean cross-entropy per example, in nats.
    """

    clients: int
    mean: float
    weighted_mean: float
    std: float
    median: float
    worst_decile: float
    best_decile: float
    loss: float


def accuracy_stats(rows: Sequence[EvalRow]) -> AccuracyStats | None:
    """Statistics over the rows of one scope, one row per client; the order of the rows does not matter.

    Returns:
        None when no row has an example.

    Raises:
        ValueError: a client appears twice.
    """
    clients = [row.client for row in rows]
    if len(set(clients)) < len(clients):
        twice = sorted({c for c in clients if clients.count(c) > 1})
        raise ValueError(f"clients {twice} appear more than once in one set of evaluations")
    counted = sorted((row for row in rows if row.total > 0), key=lambda row: row.client)
    if not counted:
        return None
    total = np.array([row.total for row in counted], dtype=np.int64)
    correct = np.array([row.correct for row in counted], dtype=np.int64)
    loss = np.array([row.loss for row in counted], dtype=np.float64)
    rates = np.sort(correct / total)
    tenth = math.ceil(len(rates) / 10)
    return AccuracyStats(
        clients=len(rates),
        mean=float(rates.mean()),
        weighted_mean=int(correct.sum()) / int(total.sum()),
        std=float(rates.std()),
        median=float(np.median(rates)),
        worst_decile=float(rates[:tenth].mean()),
        best_decile=float(rates[-tenth:].mean()),
        loss=float((loss / total).mean()),
    )


def accuracy_by_scope(rows: Iterable[EvalRow]) -> dict[Scope, AccuracyStats]:
    """Statistics for every scope that has an example, in the order of `SCOPES`."""
    grouped: dict[Scope, list[EvalRow]] = {}
    for row in rows:
        grouped.setdefault(Scope(row.model, row.split, row.phase), []).append(row)
    found = ((scope, accuracy_stats(grouped[scope])) for scope in SCOPES if scope in grouped)
    return {scope: stats for scope, stats in found if stats is not None}


def validation_score(rows: Sequence[EvalRow], reported: tuple[str, str]) -> float | None:
    """Mean validation accuracy of the model and phase that count; None where nothing of the kind was evaluated."""
    stats = accuracy_stats([row for row in rows if row.split == "val" and (row.model, row.phase) == reported])
    return None if stats is None else stats.mean


def mean_losses(reports: Iterable[TrainReport]) -> dict[str, float]:
    """Mean of each named loss term over the clients that report it, weighted by their training examples.

    Terms keep the order in which they are first met, by client id. A term whose clients have no examples is left out.
    """
    terms: dict[str, list[tuple[int, float]]] = {}
    for report in sorted(reports, key=lambda report: report.client):
        for name, value in report.losses.items():
            terms.setdefault(name, []).append((report.num_examples, value))
    weights = {name: sum(n for n, _ in pairs) for name, pairs in terms.items()}
    return {name: sum(n * x for n, x in pairs) / weights[name] for name, pairs in terms.items() if weights[name] > 0}
