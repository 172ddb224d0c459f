"""Metrics over clients and mean losses of a round, as pure functions of the values of clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np

from pflsim.display.metrics import THRESHOLD, UNDIRECTED
from pflsim.types import SPLITS, EvalPhase, EvalRow, ModelKind, Split, TrainReport

Key = TypeVar("Key")
Value = TypeVar("Value")


class Scope(NamedTuple):
    """Identifies an evaluation: the model, the split, and the phase of the round."""

    model: ModelKind
    split: Split
    phase: EvalPhase


@dataclass(frozen=True, slots=True)
class Measures:
    """The metrics of a run.

    Args:
        names: of all metrics; the accuracy of classification is always among them.
        primary: the one that decides: best round, early stopping, tuning, comparison, report.
        lower: those of which a lower value is better.
        domains: the domain of each client; (): there are none.
    """

    names: tuple[str, ...] = ("accuracy",)
    primary: str = "accuracy"
    lower: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The metrics with a column in per_client.csv; accuracy is `correct` / `total`."""
        return tuple(name for name in self.names if name != "accuracy")


@dataclass(frozen=True, slots=True)
class Stats:
    """A metric over clients. Clients for which it is undefined are left out.

    Args:
        clients: the number of clients with a value.
        undefined: the number of clients with examples, but without a value.
        mean: unweighted mean of the clients' values.
        weighted_mean: mean weighted by the clients' examples; of accuracy Σ correct / Σ total.
        pooled: the metric over the examples of all clients together; NaN if it was not computed.
        std: population standard deviation of the values.
        median: median of the values.
        worst_decile: mean of the ⌈clients / 10⌉ worst values: the lowest, or the highest if lower is better; NaN if
            neither is.
        best_decile: mean of the ⌈clients / 10⌉ best values.
    """

    clients: int = 0
    undefined: int = 0
    mean: float = math.nan
    weighted_mean: float = math.nan
    pooled: float = math.nan
    std: float = math.nan
    median: float = math.nan
    worst_decile: float = math.nan
    best_decile: float = math.nan


STATISTICS = ("clients", "mean", "weighted_mean", "std", "median", "worst_decile", "best_decile")
"""The statistics of accuracy in a line of metrics.jsonl and in summary.json."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a round's evaluation found in one scope, over the clients with examples.

    Args:
        clients: the number of clients.
        loss: unweighted mean over clients of the mean loss per example; of cross-entropy in nats.
        metrics: the metrics by name.
        measures: which of them is primary, and the directions.
        domains: mean of the primary metric over the clients of each domain that have it.
    """

    clients: int
    loss: float
    metrics: Mapping[str, Stats]
    measures: Measures = Measures()
    domains: Mapping[str, float] = field(default_factory=dict)

    @property
    def primary(self) -> Stats:
        """The primary metric."""
        return self.metrics[self.measures.primary]

    @property
    def mean(self) -> float:
        """Unweighted mean over clients of the primary metric."""
        return self.primary.mean

    @property
    def score(self) -> float:
        """The mean of the primary metric, negative if lower is better, so that a higher score is better."""
        mean = -self.mean if self.measures.primary in self.measures.lower else self.mean
        return -math.inf if math.isnan(mean) else mean

    def values(self) -> dict[str, Any]:
        """Return the statistics of accuracy, the loss, and the means of the other metrics by name."""
        accuracy = self.metrics.get("accuracy")
        found = {name: getattr(accuracy, name) for name in STATISTICS} if accuracy else {"clients": self.clients}
        others = {name: stats.mean for name, stats in self.metrics.items() if name != "accuracy"}
        return found | {"loss": self.loss} | others

    def record(self) -> dict[str, Any]:
        """Return `values`, with all statistics of the other metrics under the key "metrics"."""
        others = {name: asdict(stats) for name, stats in self.metrics.items() if name != "accuracy"}
        domains = {"domains": dict(self.domains)} if self.domains else {}
        return self.values() | ({"metrics": others} if others else {}) | domains

    @classmethod
    def of(cls, record: Mapping[str, Any], measures: Measures) -> Evaluation:
        """Return the evaluation with this `record`."""
        found = {name: Stats(**stats) for name, stats in record.get("metrics", {}).items()}
        if "mean" in record:
            known = {name: record[name] for name in STATISTICS}
            found = {"accuracy": Stats(**known, pooled=record["weighted_mean"]), **found}
        return cls(record["clients"], record["loss"], found, measures, record.get("domains", {}))


def evaluation(
    rows: Sequence[EvalRow], measures: Measures | None = None, pooled: Mapping[str, float] | None = None
) -> Evaluation | None:
    """Return statistics over the rows of one scope, one row per client; None if no row has examples.

    The order of the rows does not matter.

    Args:
        rows: the rows.
        measures: the metrics of the run; None: accuracy, and those that the first row has.
        pooled: metrics over the examples of all rows.
    """
    counted = sorted((row for row in rows if row.total > 0), key=lambda row: row.client)
    if not counted:
        return None
    measures = measures or Measures(("accuracy", *counted[0].metrics))
    loss = float((np.array([row.loss for row in counted]) / np.array([row.total for row in counted])).mean())
    metrics = {name: _stats(name, counted, name in measures.lower, pooled or {}) for name in measures.names}
    domains, primary = dict[str, float](), measures.primary
    for name in dict.fromkeys(measures.domains):
        own = [row for row in counted if measures.domains[row.client] == name]
        if own:
            domains[name] = _stats(primary, own, primary in measures.lower, {}).mean
    return Evaluation(len(counted), loss, metrics, measures, domains)


def _stats(name: str, rows: Sequence[EvalRow], lower: bool, pooled: Mapping[str, float]) -> Stats:
    """Return the statistics of a metric over rows with examples, in the order of the clients."""
    accuracy = name == "accuracy" and rows[0].correct is not None
    found = [row for row in rows if accuracy or name in row.metrics]
    if not found:
        return Stats(undefined=len(rows), pooled=pooled.get(name, math.nan))
    total = np.array([row.metrics.get("tokens", row.total) for row in found])  # of next tokens, these are what counts
    if accuracy:
        correct = np.array([row.correct for row in found])
        values, mean = correct / total, _mean(correct.tolist(), total.tolist())
        weighted = together = int(correct.sum()) / int(total.sum())
    else:
        values = np.array([row.metrics[name] for row in found])
        mean, weighted, together = float(values.mean()), float(total @ values / total.sum()), pooled.get(name, math.nan)
        if "tokens" in found[0].metrics:
            exponent = float(np.exp(total @ np.log(values) / total.sum())) if name == "perplexity" else weighted
            together = float(total.sum()) if name == "tokens" else exponent
    ordered, tenth = np.sort(values), math.ceil(len(values) / 10)
    ends = float(ordered[:tenth].mean()), float(ordered[-tenth:].mean())
    ends = (math.nan, math.nan) if name in (THRESHOLD, *UNDIRECTED) else ends
    return Stats(
        clients=len(found),
        undefined=len(rows) - len(found),
        mean=mean,
        weighted_mean=weighted,
        pooled=together,
        std=float(ordered.std()),
        median=float(np.median(ordered)),
        worst_decile=ends[lower],
        best_decile=ends[not lower],
    )


def _mean(correct: Sequence[int], total: Sequence[int]) -> float:
    """Return the mean of correct / total, correctly rounded, so that equal means of two rounds are equal numbers."""
    common = math.lcm(*total)
    return sum(c * (common // t) for c, t in zip(correct, total, strict=True)) / (common * len(total))


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in order of first appearance."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def rows_by_scope(rows: Iterable[EvalRow]) -> dict[Scope, list[EvalRow]]:
    """Return the rows with examples by scope."""
    return grouped((Scope(row.model, row.split, row.phase), row) for row in rows if row.total > 0)


def evaluations_by_scope(
    rows: Iterable[EvalRow], measures: Measures | None = None, pooled: Mapping[Any, Mapping[str, float]] | None = None
) -> dict[Scope, Evaluation]:
    """Return statistics for every scope with examples, by model, split (test sets last) and phase; see `evaluation`."""
    own, known = rows_by_scope(rows), (get_args(ModelKind), SPLITS, get_args(EvalPhase))

    def place(scope: Scope) -> list[int]:
        return [(*names, name).index(name) for names, name in zip(known, scope, strict=True)]

    found = ((s, evaluation(own[s], measures, (pooled or {}).get(s))) for s in sorted(own, key=place))
    return {scope: stats for scope, stats in found if stats is not None}


def validation_score(rows: Sequence[EvalRow], reported: Scope, measures: Measures | None = None) -> float | None:
    """Return the score of the reported model on validation data; None if it was not evaluated."""
    found = evaluation(rows_by_scope(rows).get(reported._replace(split="val"), ()), measures)
    return None if found is None else found.score


def mean_losses(reports: Iterable[TrainReport]) -> dict[str, float]:
    """Return the mean of each named loss term over the clients that report it, weighted by their training examples.

    Terms are in the order of their first appearance, by client id. Terms whose clients have no examples are left out.
    """
    ordered = sorted(reports, key=lambda report: report.client)
    terms = grouped((name, (each.num_examples, value)) for each in ordered for name, value in each.losses.items())
    weights = {name: sum(n for n, _ in pairs) for name, pairs in terms.items()}
    return {name: sum(n * x for n, x in pairs) / weights[name] for name, pairs in terms.items() if weights[name] > 0}
