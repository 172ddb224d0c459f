"""metrics.jsonl: one line of metrics per round. Summaries and reports are computed from these lines alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from pflsim.records.accounting import Traffic, round_traffic
from pflsim.records.metrics import AccuracyStats, Model, Phase, Scope, accuracy_by_scope, mean_losses
from pflsim.types import Fault, RoundRecord, Split


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """The metrics of one round.

    Args:
        round: from 1; 0 is the initial round.
        cohort: the number of clients in the round.
        losses: mean of each named loss term over the clients, weighted by their training examples.
        accuracy: statistics over clients by scope; empty if the round has no evaluation.
        traffic: bytes of this round.
        traffic_total: bytes of all rounds up to this one.
        seconds: wall seconds by phase of the round, and "total". All other fields are reproducible.
        faults: the number of clients with a fault, by kind; kinds without clients are left out.
        drift: "mean" and "max" over clients of ‖w_i − w̄‖; empty if clients send no weights.
    """

    round: int
    cohort: int
    losses: Mapping[str, float]
    accuracy: Mapping[Scope, AccuracyStats]
    traffic: Traffic
    traffic_total: Traffic
    seconds: Mapping[str, float]
    faults: Mapping[str, int] = field(default_factory=dict)
    drift: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_seconds(self) -> float:
        """Return the wall seconds of the whole round."""
        return self.seconds["total"]


def round_metrics(record: RoundRecord, earlier: Traffic) -> RoundMetrics:
    """Compute the metrics of a round.

    Args:
        record: the round. If its `seconds` have no "total", it is the sum of the phases.
        earlier: the traffic of all rounds before.
    """
    traffic, drift = round_traffic(record), list(record.drift.values())
    return RoundMetrics(
        round=record.round,
        cohort=len(record.cohort),
        losses=mean_losses(record.reports),
        accuracy=accuracy_by_scope(record.evaluations),
        traffic=traffic,
        traffic_total=earlier + traffic,
        seconds={**record.seconds, "total": record.seconds.get("total", sum(record.seconds.values()))},
        faults=fault_counts(record.faults),
        drift={"mean": sum(drift) / len(drift), "max": max(drift)} if drift else {},
    )


def fault_counts(faults: Mapping[int, str]) -> dict[str, int]:
    """Return the number of clients by kind of fault, in the order of `Fault`; kinds without clients are left out."""
    kinds = list(faults.values())
    return {kind: kinds.count(kind) for kind in get_args(Fault) if kind in kinds}


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot represent, by None at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def to_line(metrics: RoundMetrics) -> str:
    """Return one line of JSON without a newline. `accuracy` is nested by model, split and phase; NaN becomes null."""
    accuracy: dict[str, dict[str, dict[str, Mapping[str, float]]]] = {}
    for scope, stats in metrics.accuracy.items():
        accuracy.setdefault(scope.model, {}).setdefault(scope.split, {})[scope.phase] = stats.values()
    content = {
        **{name: getattr(metrics, name) for name in ("round", "cohort", "losses")},
        "accuracy": accuracy,
        "traffic": {
            "up_bytes": metrics.traffic.up_bytes,
            "down_bytes": metrics.traffic.down_bytes,
            "up_bytes_total": metrics.traffic_total.up_bytes,
            "down_bytes_total": metrics.traffic_total.down_bytes,
        },
        **{name: getattr(metrics, name) for name in ("faults", "drift", "seconds")},
    }
    return json.dumps(finite(content), allow_nan=False, ensure_ascii=False)


def from_line(line: str) -> RoundMetrics:
    """Parse a line of `to_line`; null becomes NaN."""
    content = json.loads(line)
    accuracy = {
        Scope(cast(Model, model), cast(Split, split), cast(Phase, phase)): AccuracyStats.of(_numbers(stats))
        for model, splits in content["accuracy"].items()
        for split, phases in splits.items()
        for phase, stats in phases.items()
    }
    traffic = content["traffic"]
    return RoundMetrics(
        round=content["round"],
        cohort=content["cohort"],
        losses=_numbers(content["losses"]),
        accuracy=accuracy,
        traffic=Traffic(traffic["up_bytes"], traffic["down_bytes"]),
        traffic_total=Traffic(traffic["up_bytes_total"], traffic["down_bytes_total"]),
        seconds=_numbers(content["seconds"]),
        faults=content["faults"],
        drift=_numbers(content["drift"]),
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in values.items()}


def read_history(folder: Path) -> list[RoundMetrics]:
    """Return all rounds in metrics.jsonl of a run folder. An incomplete last line is ignored."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [from_line(line) for line in whole.split("\n") if line]
