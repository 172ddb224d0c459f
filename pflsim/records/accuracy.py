"""Accuracy over clients and mean losses of a round, as pure functions of its counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product, starmap
from typing import Any, NamedTuple, get_args

import numpy as np

from pflsim.types import EvalPhase, EvalRow, ModelKind, Split, TrainReport


class Scope(NamedTuple):
    """Identifies an evaluation: the model, the split, and the phase of the round."""

    model: ModelKind
    split: Split
    phase: EvalPhase


SCOPES = tuple(starmap(Scope, product(*map(get_args, (ModelKind, Split, EvalPhase)))))
"""All scopes, in the order of the output."""


@dataclass(frozen=True, slots=True)
class AccuracyStats:
    """Accuracy over clients. A client's accuracy is correct / total; clients without examples are left out.

    Args:
        clients: the number of clients.
        mean: unweighted mean of the clients' accuracies.
        weighted_mean: Σ correct / Σ total, the accuracy over examples.
        std: population standard deviation of the accuracies.
        median: median of the accuracies.
        worst_decile: mean accuracy of the ⌈clients / 10⌉ clients with the lowest accuracies.
        best_decile: mean accuracy of the ⌈clients / 10⌉ clients with the highest accuracies.
        loss: unweighted mean over clients of the mean cross-entropy per example, in nats.
        metrics: unweighted means over clients of the metrics besides accuracy, by name.
    """

    clients: int
    mean: float
    weighted_mean: float
    std: float
    median: float
    worst_decile: float
    best_decile: float
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """Return all values by name, with the metrics beside the others."""
        return {name: getattr(self, name) for name in STATISTICS} | dict(self.metrics)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> AccuracyStats:
        """Return the statistics with these `values`."""
        known = {name: values[name] for name in STATISTICS}
        return cls(**known, metrics={name: value for name, value in values.items() if name not in known})


STATISTICS = tuple(field.name for field in fields(AccuracyStats) if field.name != "metrics")
"""The statistics that every evaluation has."""


def accuracy_stats(rows: Sequence[EvalRow]) -> AccuracyStats | None:
    """Return statistics over the rows of one scope, one row per client; None if no row has examples.

    The order of the rows does not matter.
    """
    counted = sorted((row for row in rows if row.total > 0), key=lambda row: row.client)
    if not counted:
        return None
    correct, total, loss = (np.array([getattr(row, name) for row in counted]) for name in ("correct", "total", "loss"))
    accuracies = np.sort(correct / total)
    tenth = math.ceil(len(accuracies) / 10)
    return AccuracyStats(
        clients=len(accuracies),
        mean=_mean(correct.tolist(), total.tolist()),
        weighted_mean=int(correct.sum()) / int(total.sum()),
        std=float(accuracies.std()),
        median=float(np.median(accuracies)),
        worst_decile=float(accuracies[:tenth].mean()),
        best_decile=float(accuracies[-tenth:].mean()),
        loss=float((loss / total).mean()),
        metrics={name: float(np.mean([row.metrics[name] for row in counted])) for name in counted[0].metrics},
    )


def _mean(correct: Sequence[int], total: Sequence[int]) -> float:
    """Return the mean of correct / total, correctly rounded, so that equal means of two rounds are equal numbers."""
    common = math.lcm(*total)
    return sum(c * (common // t) for c, t in zip(correct, total, strict=True)) / (common * len(total))


def rows_by_scope(rows: Iterable[EvalRow]) -> dict[Scope, list[EvalRow]]:
    """Return the rows with examples by scope."""
    grouped: dict[Scope, list[EvalRow]] = {}
    for row in rows:
        if row.total > 0:
            grouped.setdefault(Scope(row.model, row.split, row.phase), []).append(row)
    return grouped


def accuracy_by_scope(rows: Iterable[EvalRow]) -> dict[Scope, AccuracyStats]:
    """Return statistics for every scope with examples, in the order of `SCOPES`."""
    grouped = rows_by_scope(rows)
    found = ((scope, accuracy_stats(grouped[scope])) for scope in SCOPES if scope in grouped)
    return {scope: stats for scope, stats in found if stats is not None}


def validation_score(rows: Sequence[EvalRow], reported: Scope) -> float | None:
    """Return the mean validation accuracy of the reported model; None if it was not evaluated."""
    scope = reported._replace(split="val")
    stats = accuracy_stats([row for row in rows if (row.model, row.split, row.phase) == scope])
    return None if stats is None else stats.mean


def mean_losses(reports: Iterable[TrainReport]) -> dict[str, float]:
    """Return the mean of each named loss term over the clients that report it, weighted by their training examples.

    Terms are in the order of their first appearance, by client id. Terms whose clients have no examples are left out.
    """
    terms: dict[str, list[tuple[int, float]]] = {}
    for report in sorted(reports, key=lambda report: report.client):
        for name, value in report.losses.items():
            terms.setdefault(name, []).append((report.num_examples, value))
    weights = {name: sum(n for n, _ in pairs) for name, pairs in terms.items()}
    return {name: sum(n * x for n, x in pairs) / weights[name] for name, pairs in terms.items() if weights[name] > 0}
