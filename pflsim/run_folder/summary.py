"""summary.json: what a run came to, as a function of its settings, the lines of metrics.jsonl, and its newcomers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from pflsim.run_folder.accounting import Traffic
from pflsim.run_folder.files import write_atomically
from pflsim.run_folder.history import RoundMetrics, finite
from pflsim.run_folder.metrics import AccuracyStats, Model, Phase, Scope, accuracy_stats
from pflsim.types import NewcomerRecord

Choice = Literal["best_val", "last", "best_test_oracle"]
"""A round that a figure is taken from; see `ModelFigures`."""


@dataclass(frozen=True, slots=True)
class RunMeta:
    """What a run's figures are about.

    Args:
        method, data, partition, model: names of the parts.
        partition_hash: hash of every client's examples; runs with the same one can be compared in pairs.
        clients: N.
        rounds: how many rounds are planned.
        seed: the run's seed.
        reported_model: the model the method is judged by.
        reported_phase: when the personal model is judged: after the client's local training, or as received.
        evaluated_on: whose data the figures are about.
        newcomers: how many of the clients are held out of the training, and of all figures but their own.
        finetune_epochs: how long they train when they have joined.
    """

    method: str
    data: str
    partition: str
    partition_hash: str
    model: str
    clients: int
    rounds: int
    seed: int
    reported_model: Model = "personal"
    reported_phase: Phase = "trained"
    evaluated_on: Literal["all", "participants"] = "all"
    newcomers: int = 0
    finetune_epochs: int = 1

    def phase(self, model: Model) -> Phase:
        """When a model is judged; the global one always as the server sends it, for no client trains it."""
        return self.reported_phase if model == "personal" else "received"


@dataclass(frozen=True, slots=True)
class Figure:
    """Test accuracy over clients in one round."""

    round: int
    stats: AccuracyStats


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Test accuracy of one model in the rounds that matter; None where there is no such round.

    Args:
        last: the last evaluated round.
        best_val: the round with the best mean validation accuracy, the first of equals; None without validation data.
        best_test_oracle: the round with the best mean test accuracy, the first of equals. It was chosen by looking at
            the test data, as the papers' tables do, so it is no estimate of anything: never a headline.
    """

    last: Figure | None
    best_val: Figure | None
    best_test_oracle: Figure | None


@dataclass(frozen=True, slots=True)
class NewcomerFigures:
    """Test accuracy over the clients that joined after the last round: as received, and after their own training.

    `down_bytes` is what they were sent, all together; it is no part of the run's traffic.
    """

    received: AccuracyStats | None
    trained: AccuracyStats | None
    down_bytes: int


def newcomer_figures(record: NewcomerRecord) -> NewcomerFigures:
    """Sum newcomers up."""
    received, trained = (
        accuracy_stats([row for row in rows if row.split == "test"]) for rows in (record.received, record.trained)
    )
    return NewcomerFigures(received, trained, sum(record.down_bytes.values()))


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to. `rounds` are those done, of `meta.rounds` planned; memory is in MB of 10⁶ bytes.

    `newcomers` is None where there are none, or not yet. `resumed_after`: the rounds after which the run was continued,
    one for each time; seconds are of all sessions, and memory is the most of any. `actor_restarts`: how many actors
    died and were replaced.
    """

    complete: bool
    meta: RunMeta
    rounds: int
    seconds: float
    accuracy: dict[Model, ModelFigures]
    traffic: Traffic
    peak_rss_mb: float
    newcomers: NewcomerFigures | None = None
    resumed_after: tuple[int, ...] = ()
    actor_restarts: int = 0


def summarise(
    meta: RunMeta,
    history: Sequence[RoundMetrics],
    complete: bool,
    seconds: float,
    peak_rss_mb: float,
    newcomers: NewcomerFigures | None = None,
    resumed_after: tuple[int, ...] = (),
) -> Summary:
    """Summarise the rounds done so far; there may be none."""
    return Summary(
        complete=complete,
        meta=meta,
        rounds=history[-1].round if history else 0,  # not the number of lines: an opening is round 0
        seconds=seconds,
        accuracy={model: model_figures(history, model, meta.phase(model)) for model in get_args(Model)},
        traffic=history[-1].traffic_total if history else Traffic(),
        peak_rss_mb=peak_rss_mb,
        newcomers=newcomers,
        resumed_after=resumed_after,
    )


def model_figures(history: Sequence[RoundMetrics], model: Model, phase: Phase) -> ModelFigures:
    """Find the rounds that matter for one model and take its test accuracy there."""

    def figure(choice: Choice) -> Figure | None:
        line = chosen_round(history, model, phase, choice)
        return None if line is None else Figure(line.round, line.accuracy[Scope(model, "test", phase)])

    return ModelFigures(figure("last"), figure("best_val"), figure("best_test_oracle"))


def chosen_round(history: Sequence[RoundMetrics], model: Model, phase: Phase, choice: Choice) -> RoundMetrics | None:
    """The round that a choice means for one model; None where there is none."""
    test, validation = Scope(model, "test", phase), Scope(model, "val", phase)
    tested = [line for line in history if test in line.accuracy]
    if choice == "last":
        return tested[-1] if tested else None
    scope = validation if choice == "best_val" else test
    return max((line for line in tested if scope in line.accuracy), key=lambda x: x.accuracy[scope].mean, default=None)


def to_dict(summary: Summary) -> dict[str, object]:
    """The content of summary.json."""
    meta = summary.meta
    return {
        "complete": summary.complete,
        "method": meta.method,
        "data": meta.data,
        "partition": meta.partition,
        "partition_hash": meta.partition_hash,
        "model": meta.model,
        "clients": meta.clients,
        "rounds": summary.rounds,
        "rounds_planned": meta.rounds,
        "seed": meta.seed,
        "seconds": round(summary.seconds, 3),
        "reported_model": meta.reported_model,
        "reported_phase": meta.phase(meta.reported_model),
        "accuracy_of": {
            "split": "test",
            "clients": meta.evaluated_on,
            "phase": {model: meta.phase(model) for model in get_args(Model)},
        },
        "accuracy": {model: _figures(figures) for model, figures in summary.accuracy.items()},
        "traffic": asdict(summary.traffic),
        "peak_rss_mb": round(summary.peak_rss_mb, 1),
        **({"resumed_after": list(summary.resumed_after)} if summary.resumed_after else {}),
        **({"actor_restarts": summary.actor_restarts} if summary.actor_restarts else {}),
        **_newcomers(summary),
    }


def _newcomers(summary: Summary) -> dict[str, object]:
    """Nothing where no client is held out."""
    meta, found = summary.meta, summary.newcomers
    if not meta.newcomers:
        return {}
    figures = {"received": None, "trained": None, "down_bytes": None} if found is None else asdict(found)
    return {"newcomers": {"clients": meta.newcomers, "finetune_epochs": meta.finetune_epochs, **figures}}


def _figures(figures: ModelFigures) -> dict[str, dict[str, float] | None]:
    named = {"last": figures.last, "best_val": figures.best_val, "best_test_oracle": figures.best_test_oracle}
    return {name: {"round": f.round, **asdict(f.stats)} if f else None for name, f in named.items()}


def write_summary(folder: Path, summary: Summary) -> None:
    """Write summary.json into a run folder, whole or not at all."""
    content = json.dumps(finite(to_dict(summary)), indent=2, allow_nan=False, ensure_ascii=False)
    write_atomically(folder / "summary.json", content + "\n")
