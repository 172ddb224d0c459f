"""summary.json: the results of a run, computed from its settings, metrics.jsonl, and the results of newcomers."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NotRequired, get_args

from pflsim.display.formats import Choice
from pflsim.errors import SettingsError
from pflsim.participation import Participation
from pflsim.privacy import each_epsilon
from pflsim.records.evaluation import Evaluation, Measures, Scope, Stats, evaluation, grouped
from pflsim.records.files import keys, write_atomically
from pflsim.records.history import RoundMetrics, Traffic, finite, rounds_drawn, stalled_since, validation_scores
from pflsim.types import SPLITS, EvalPhase, EvalRow, ModelKind, NewcomerRecord, Precision, Split, TaskName

SummaryFile = keys({
    "complete": bool, "method": str, "data": str, "partition": str, "model": str, "clients": int, "rounds": int,
    "rounds_planned": int, "seed": int, "seconds": float, "peak_rss_mb": float, "reported_model": ModelKind,
    "accuracy_of": keys({"clients": str, "phase": keys({"personal": EvalPhase, "global": EvalPhase})}),
    "states_saved": NotRequired[bool], "stopped_early": NotRequired[Mapping[str, int | str]],
    "resumed_after": NotRequired[list[int]], "actor_restarts": NotRequired[int], "warnings": NotRequired[list[str]],
    "newcomers": NotRequired[Mapping[str, Any]], "primary": NotRequired[keys({"name": str, "higher_is_better": bool})],
})  # fmt: skip
"""The keys of summary.json that are read back."""
OF_SETS = ("clients", "mean", "weighted_mean", "std", "worst_decile")
"""The statistics of a test set besides the clients' own."""


@dataclass(frozen=True, slots=True)
class RunMeta:
    """The attributes of a run in its summary.

    Args:
        method, data, partition, model: names of the components.
        partition_hash: hash of every client's examples. Runs with the same hash can be compared client by client.
        clients: N.
        rounds: the number of planned rounds.
        seed: the run's seed.
        reported_model: the model whose accuracy the method reports.
        reported_phase: the phase in which the personal model is reported.
        evaluated_on: `eval.clients` as text.
        measures: names of the metrics, the primary one, and their directions.
        client_names: of all clients; (): they have no names.
        newcomers: the number of clients that join after the last round. Only their own results include them.
        finetune_epochs: the epochs that newcomers train.
        classes: C.
        task: what is predicted.
        patience: of early stopping; None: the run does all rounds.
        precision: of convolutions and matrix products.
        loss: its name, if the task was found from the targets of a user's data.
        remedy: the settings that help if training diverges.
        attack: name, fraction and malicious clients of an attack; None: every client is evaluated.
        privacy: unit, delta, noise, clip and sampling of differential privacy; None: there is none. If examples are
            the unit, noise and sampling are lists with a value for each client, and so are its steps per round.
        fraction, participation: how the clients of a round are drawn.
    """

    method: str
    data: str
    partition: str
    partition_hash: str
    model: str
    clients: int
    rounds: int
    seed: int
    reported_model: ModelKind = "personal"
    reported_phase: EvalPhase = "trained"
    evaluated_on: str = "all"
    measures: Measures = Measures()
    client_names: tuple[str, ...] = ()
    newcomers: int = 0
    finetune_epochs: int = 1
    classes: int = 2
    task: TaskName = "classification"
    patience: int | None = None
    precision: Precision = "ieee"
    loss: str = ""
    remedy: str = "a smaller lr"
    fraction: float = 1.0
    participation: Participation = Participation()
    attack: Mapping[str, Any] | None = None
    privacy: Mapping[str, Any] | None = None

    def phase(self, model: ModelKind) -> EvalPhase:
        """Return the phase in which a model is reported; "received" for the global model, which no client trains."""
        return self.reported_phase if model == "personal" else "received"

    @property
    def recalibrates(self) -> bool:
        """Whether a constant can be added to the outputs: of values, or of the logit of two classes."""
        return self.task == "regression" or (self.task == "classification" and self.classes == 2)

    @property
    def reported(self) -> Scope:
        """The scope that the method reports: the reported model on test data."""
        return Scope(self.reported_model, "test", self.phase(self.reported_model))


def newcomer_results(record: NewcomerRecord, measures: Measures) -> dict[str, Evaluation | None]:
    """Return the test results of the clients that joined after the last round by phase, see `NewcomerRecord`."""
    found: dict[str, Sequence[EvalRow]] = {"received": record.received, "trained": record.trained}
    found |= grouped((row.phase, row) for row in record.few)
    return {phase: evaluation([row for row in rows if row.split == "test"], measures) for phase, rows in found.items()}


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a run.

    Args:
        meta: attributes of the run.
        history: the metrics of the rounds so far, if any.
        complete: whether the run did everything that was planned.
        states_saved: whether a complete run has a checkpoint of its last round; its disk may have been full.
        seconds: wall seconds of all sessions.
        peak_rss_mb: the peak memory of any session, in MB (10⁶ bytes).
        newcomers: evaluations of newcomers; None if there are none yet.
        resumed_after: the round after which each resumed session continued.
        actor_restarts: the number of actors that died and were replaced.
        warnings: what makes the results doubtful.
        stopped: why a callback ended the run, or "".
    """

    meta: RunMeta
    history: list[RoundMetrics]
    complete: bool
    seconds: float
    peak_rss_mb: float
    newcomers: NewcomerRecord | None = None
    resumed_after: tuple[int, ...] = ()
    actor_restarts: int = 0
    states_saved: bool = True
    warnings: tuple[str, ...] = ()
    stopped: str = ""

    @property
    def rounds(self) -> int:
        """The number of finished rounds."""
        return self.history[-1].round if self.history else 0  # not len(history), which counts the initial round

    @property
    def stopped_early(self) -> str:
        """Why the run ended before the last planned round; empty if it did not."""
        if self.stopped and self.rounds < self.meta.rounds:
            return self.stopped
        best = stalled_since(validation_scores(self.history, self.meta.reported), self.meta.patience)
        if best is None or self.rounds >= self.meta.rounds:
            return ""
        primary, patience = self.meta.measures.primary, self.meta.patience
        return f"no better mean validation {primary} than in round {best} (stop.patience={patience})"

    @property
    def drawn(self) -> Counter[int]:
        """The number of rounds in which each client that trains was drawn; those that never were are left out."""
        meta = self.meta
        how = meta.seed, meta.clients - meta.newcomers, meta.fraction, meta.participation
        return rounds_drawn(self.history, *how)

    @property
    def traffic(self) -> Traffic:
        """The traffic of all rounds."""
        return self.history[-1].traffic_total if self.history else Traffic()

    def figures(self, model: ModelKind, split: Split = "test") -> dict[Choice, tuple[int, Evaluation] | None]:
        """Return the chosen rounds with the results of one model on a test set; None if there is no such round."""
        scope = Scope(model, split, self.meta.phase(model))
        rounds = {choice: chosen_round(self.history, scope, choice) for choice in get_args(Choice)}
        return {choice: line and (line.round, line.evaluations[scope]) for choice, line in rounds.items()}


def chosen_round(history: Sequence[RoundMetrics], test: Scope, choice: Choice) -> RoundMetrics | None:
    """Return the round of a choice for a model, whose scope on test data is `test`; None if there is none."""
    tested = [line for line in history if test in line.evaluations]
    if choice == "last":
        return tested[-1] if tested else None
    scope = test._replace(split="val") if choice == "best_val" else test
    scored = (line for line in tested if scope in line.evaluations)
    return max(scored, key=lambda line: line.evaluations[scope].score, default=None)


def epsilons(about: Mapping[str, Any], rounds: int, drawn: Mapping[int, int]) -> list[float]:
    """Return ε of a run so far; of examples, that of each client. [] without noise, or without dp-accounting.

    Args:
        about: `RunMeta.privacy`.
        rounds: so many.
        drawn: in how many of them each client was drawn.
    """
    if about["unit"] == "client":
        each = [(about["sampling"], about["noise"], rounds)]
    else:
        steps = (drawn.get(client, 0) * own for client, own in enumerate(about["steps"]))
        each = zip(about["sampling"], about["noise"], steps, strict=True)
    with suppress(SettingsError):
        found = each_epsilon([(sampling, noise, about["delta"], number) for sampling, noise, number in each])
        return found if all(map(math.isfinite, found)) else []
    return []


def _privacy(summary: Summary) -> dict[str, Any] | None:
    if (about := summary.meta.privacy) is None:
        return None
    found: Any = epsilons(about, summary.rounds, summary.drawn) or None
    if found:
        each = {"max": max(found), "mean": sum(found) / len(found), "clients": found}
        found = each if about["unit"] == "example" else found[0]
    return {**about, "rounds": summary.rounds, "epsilon": found}


def to_dict(summary: Summary) -> dict[str, object]:
    """Return the content of summary.json."""
    meta, reason = summary.meta, summary.stopped_early
    phases = {model: meta.phase(model) for model in get_args(ModelKind)}
    present = {
        "states_saved": None if summary.states_saved else False,
        "stopped_early": {"round": summary.rounds, "reason": reason} if reason else None,
        "resumed_after": list(summary.resumed_after) or None,
        "actor_restarts": summary.actor_restarts or None,
        "warnings": list(summary.warnings) or None,
        "newcomers": _newcomers(summary) if meta.newcomers else None,
        "attack": meta.attack,
        "privacy": _privacy(summary),
    }
    return {
        "complete": summary.complete,
        **{name: getattr(meta, name) for name in ("method", "data", "partition", "partition_hash", "model", "clients")},
        "rounds": summary.rounds,
        "rounds_planned": meta.rounds,
        "seed": meta.seed,
        "precision": meta.precision,
        "seconds": round(summary.seconds, 3),
        "reported_model": meta.reported_model,
        "reported_phase": phases[meta.reported_model],
        "accuracy_of": {"split": "test", "clients": meta.evaluated_on, "phase": phases},
        **_results(summary),
        **_sets(summary),
        "traffic": asdict(summary.traffic),
        "peak_rss_mb": round(summary.peak_rss_mb, 1),
        **{name: value for name, value in present.items() if value is not None},
    }


def _results(summary: Summary) -> dict[str, object]:
    """Return the test results of both models in the chosen rounds: accuracy, and all metrics by name."""
    measures = summary.meta.measures
    found = {model: summary.figures(model) for model in get_args(ModelKind)}

    def nested(values: Callable[[Evaluation], Mapping[str, Any]]) -> dict[str, object]:
        return {
            model: {choice: f and {"round": f[0], **values(f[1])} for choice, f in figures.items()}
            for model, figures in found.items()
        }

    accuracy = {"accuracy": nested(Evaluation.values)} if "accuracy" in measures.names else {}
    metrics = {name: nested(lambda each, name=name: asdict(each.metrics.get(name, Stats()))) for name in measures.names}
    primary = {"name": measures.primary, "higher_is_better": measures.primary not in measures.lower}
    domains = {"domains": nested(lambda each: {"mean": dict(each.domains)})} if measures.domains else {}
    return {**accuracy, "metrics": metrics, "primary": primary, **domains}


def _sets(summary: Summary) -> dict[str, object]:
    """Return the primary metric on the test sets besides the clients' own, if there are any."""
    names = dict.fromkeys(s.split for line in summary.history for s in line.evaluations if s.split not in SPLITS)

    def result(found: tuple[int, Evaluation] | None) -> dict[str, Any] | None:
        return found and {"round": found[0], **{name: getattr(found[1].primary, name) for name in OF_SETS}}

    def of(name: str, model: ModelKind) -> dict[str, object]:
        return {choice: result(found) for choice, found in summary.figures(model, name).items()}

    found = {name: {model: of(name, model) for model in get_args(ModelKind)} for name in names}
    return {"sets": found} if found else {}


def _newcomers(summary: Summary) -> dict[str, object]:
    """Return the results of newcomers. The traffic of the run does not include their downlinks."""
    meta, record = summary.meta, summary.newcomers or NewcomerRecord(0, {}, (), ())
    accuracy = {phase: stats and stats.values() for phase, stats in newcomer_results(record, meta.measures).items()}
    down = {"down_bytes": sum(record.down_bytes.values()) if summary.newcomers else None}
    return {"clients": meta.newcomers, "finetune_epochs": meta.finetune_epochs, **accuracy, **down}


def write_summary(folder: Path, summary: Summary) -> None:
    """Write summary.json to a run folder atomically."""
    content = json.dumps(finite(to_dict(summary)), indent=2, allow_nan=False, ensure_ascii=False)
    write_atomically(folder / "summary.json", content + "\n")
