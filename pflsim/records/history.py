"""metrics.jsonl: one line of metrics per round. Summaries and reports are computed from these lines alone."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired, cast, get_args

from pflsim.participation import Participation
from pflsim.records.evaluation import Evaluation, Measures, Scope, evaluations_by_scope, mean_losses
from pflsim.records.files import keys, valid
from pflsim.seeding import past_cohort
from pflsim.types import EvalPhase, Fault, ModelKind, RoundRecord, Split, Traffic

METRICS = "metrics.jsonl"


def client_traffic(record: RoundRecord) -> dict[int, Traffic]:
    """Return each client's traffic in a round, by ascending id. Clients without traffic are left out."""
    up, down = {report.client: report.up_bytes for report in record.reports}, record.down_bytes
    clients, none = sorted({*up, *down, *record.surveyed}), Traffic()
    traffic = {c: Traffic(up.get(c, 0), down.get(c, 0)) + record.surveyed.get(c, none) for c in clients}
    return {client: both for client, both in traffic.items() if both != none}


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """The metrics of one round.

    Args:
        round: from 1; 0 is the initial round.
        cohort: the number of clients in the round.
        losses: mean of each named loss term over the clients, weighted by their training examples.
        evaluations: metrics over clients by scope; empty if the round has no evaluation.
        traffic: bytes of this round.
        traffic_total: bytes of all rounds up to this one.
        seconds: wall seconds by phase of the round, and "total". All other fields are reproducible.
        faults: the number of clients with a fault, by kind; kinds without clients are left out.
        drift: "mean" and "max" over clients of ‖w_i − w̄‖; empty if clients send no weights.
        virtual_seconds: of the virtual clock; None: the run has none.
    """

    round: int
    cohort: int
    losses: Mapping[str, float]
    evaluations: Mapping[Scope, Evaluation]
    traffic: Traffic
    traffic_total: Traffic
    seconds: Mapping[str, float]
    faults: Mapping[str, int] = field(default_factory=dict)
    drift: Mapping[str, float] = field(default_factory=dict)
    virtual_seconds: float | None = None

    @property
    def clock_seconds(self) -> float:
        """Return the seconds of the round by the virtual clock, or the wall seconds without one."""
        return self.total_seconds if self.virtual_seconds is None else self.virtual_seconds

    @property
    def total_seconds(self) -> float:
        """Return the wall seconds of the whole round."""
        return self.seconds["total"]


def round_metrics(record: RoundRecord, earlier: Traffic, measures: Measures | None = None) -> RoundMetrics:
    """Compute the metrics of a round.

    Args:
        record: the round. If its `seconds` have no "total", it is the sum of the phases.
        earlier: the traffic of all rounds before.
        measures: the metrics of the run; None: those that the record has.
    """
    traffic, drift = sum(client_traffic(record).values(), Traffic()), list(record.drift.values())
    return RoundMetrics(
        round=record.round,
        cohort=len(record.cohort),
        losses=mean_losses(record.reports),
        evaluations=evaluations_by_scope(record.evaluations, measures, record.pooled),
        traffic=traffic,
        traffic_total=earlier + traffic,
        seconds={**record.seconds, "total": record.seconds.get("total", sum(record.seconds.values()))},
        faults={kind: count for kind in get_args(Fault) if (count := list(record.faults.values()).count(kind))},
        drift={"mean": sum(drift) / len(drift), "max": max(drift)} if drift else {},
        virtual_seconds=record.virtual_seconds,
    )


def rounds_drawn(
    history: Iterable[RoundMetrics], seed: int, clients: int, fraction: float, how: Participation
) -> Counter[int]:
    """Return the number of rounds in which each client was drawn, those in which it dropped out included."""
    each = (past_cohort(line.cohort, seed, line.round, clients, fraction, how) for line in history if line.round)
    return Counter(client for cohort in each for client in cohort)


Scopes = Mapping[ModelKind, Mapping[Split, Mapping[EvalPhase, Mapping[str, Any]]]]
Line = keys({
    "round": int, "cohort": int, "losses": Mapping[str, float], "traffic": Mapping[str, int],
    "accuracy": NotRequired[Scopes], "evaluation": NotRequired[Scopes], "measures": NotRequired[Mapping[str, Any]],
    "faults": Mapping[str, int], "drift": Mapping[str, float], "seconds": keys({"total": float}),
    "virtual_seconds": NotRequired[float],
})  # fmt: skip
"""The keys of a line of metrics.jsonl."""


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot represent, by None at any depth."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def to_line(metrics: RoundMetrics) -> str:
    """Return one line of JSON without a newline. NaN becomes null.

    Evaluations are nested by model, split and phase, as `accuracy`, or as `evaluation` if classes are not predicted.
    """
    nested: dict[str, dict[str, dict[str, Mapping[str, Any]]]] = {}
    measures = next((found.measures for found in metrics.evaluations.values()), Measures())
    for scope, found in metrics.evaluations.items():
        nested.setdefault(scope.model, {}).setdefault(scope.split, {})[scope.phase] = found.record()
    total = {f"{name}_total": value for name, value in asdict(metrics.traffic_total).items()}
    key = "accuracy" if "accuracy" in measures.names else "evaluation"
    known = {key: nested, "traffic": asdict(metrics.traffic) | total}
    names = ("round", "cohort", "losses", key, "traffic", "faults", "drift", "seconds")
    content = {name: known[name] if name in known else getattr(metrics, name) for name in names}
    if measures != Measures():
        content["measures"] = asdict(measures)
    if metrics.virtual_seconds is not None:
        content["virtual_seconds"] = metrics.virtual_seconds
    return json.dumps(finite(content), allow_nan=False, ensure_ascii=False)


def from_line(line: str) -> RoundMetrics:
    """Parse a line of `to_line`; null becomes NaN.

    Raises:
        ValueError, LookupError, TypeError: it is damaged.
    """
    found = json.loads(line, object_hook=lambda each: {k: math.nan if v is None else v for k, v in each.items()})
    valid(Line, found)
    measures = valid(Measures, found.pop("measures", {}))
    evaluations = {
        Scope(cast(ModelKind, model), split, cast(EvalPhase, phase)): Evaluation.of(stats, measures)
        for model, splits in found.pop("accuracy", found.pop("evaluation", {})).items()
        for split, phases in splits.items()
        for phase, stats in phases.items()
    }
    sent = found["traffic"]
    traffic, total = (Traffic(*(sent[f"{name}{end}"] for name in Traffic.__match_args__)) for end in ("", "_total"))
    return RoundMetrics(**{**found, "evaluations": evaluations, "traffic": traffic, "traffic_total": total})


def read_history(folder: Path) -> list[RoundMetrics]:
    """Return all rounds in metrics.jsonl of a run folder. An incomplete last line is ignored."""
    return [from_line(line) for line in (folder / METRICS).read_text(encoding="utf-8").split("\n")[:-1] if line]


def validation_scores(history: Iterable[RoundMetrics], reported: Scope) -> dict[int, float]:
    """Return the validation score of the reported model by round, for the rounds that evaluate it."""
    scope = reported._replace(split="val")
    return {line.round: line.evaluations[scope].score for line in history if scope in line.evaluations}


def stalled_since(scores: Mapping[int, float], patience: int | None) -> int | None:
    """Return the round after which `patience` evaluations in sequence are not better, so that the run stops early.

    Args:
        scores: the score by round, ascending. An equal score is not better.
        patience: the number of evaluations, from 1; None: any number is accepted.

    Returns:
        None if there is no such round.
    """
    best, waited = None, 0
    for number, score in scores.items():
        if best is None or score > scores[best]:
            best, waited = number, 0
        else:
            waited += 1
        if waited == patience:
            return best
    return None
