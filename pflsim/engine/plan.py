"""What is decided before the first round of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pflsim.types import EvalPhase, ModelKind, Split


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What is decided before the first round.

    Args:
        method: the method's name.
        cohorts: the clients of each round.
        clients: N, the number of clients that train.
        splits: the splits to evaluate: test, and val if there is one.
        reported_phase: whether the reported personal model is the received or the trained one.
        received: evaluate personal models both as received and after local training.
        eval_every: evaluate every so many rounds, and in the last one.
        eval_all: evaluate all clients instead of the round's cohort.
        trace_rounds: rounds whose messages are written to files.
        checkpoint_every, checkpoint_seconds, checkpoint_keep: as in the settings, with seconds instead of minutes.
        initial_round: all clients reply once before round 1.
        header: metadata of the run for checkpoints.
        units: names of the fusion units in their order, for the trace.
        newcomers: clients that join after the last round.
        finetune_epochs: epochs of the newcomers' fine-tuning.
        reported_model: the model that the method reports, personal or global.
        absentees, stragglers: clients of each round's cohort; empty: none in any round.
        straggler_work: the share of its mini-batches that a straggler trains on.
        diagnostics_every: compute the matrices of the diagnostics every so many rounds, and in the last one.
        classes: C, for the confusion matrix; 0: none is computed.
        adapts: the reported model is adapted to each client's examples, so checkpoints store it.
        patience: end after so many evaluations without a better validation accuracy; None: after the last round.
    """

    method: str
    cohorts: tuple[tuple[int, ...], ...]
    clients: int
    splits: tuple[Split, ...] = ("test",)
    reported_phase: EvalPhase = "trained"
    received: bool = False
    eval_every: int = 1
    eval_all: bool = True
    trace_rounds: tuple[int, ...] = ()
    checkpoint_every: int = 0
    checkpoint_seconds: float = 0.0
    checkpoint_keep: int = 1
    initial_round: bool = False
    header: Mapping[str, Any] | None = None
    units: tuple[str, ...] = ()
    newcomers: tuple[int, ...] = ()
    finetune_epochs: int = 1
    reported_model: ModelKind = "personal"
    absentees: tuple[tuple[int, ...], ...] = ()
    stragglers: tuple[tuple[int, ...], ...] = ()
    straggler_work: float = 0.5
    diagnostics_every: int = 10
    classes: int = 0
    patience: int | None = None
    adapts: bool = False

    def absent(self, round_number: int) -> tuple[int, ...]:
        """Return the clients of a round's cohort that do not take part."""
        return self.absentees[round_number - 1] if self.absentees else ()

    def slow(self, round_number: int) -> tuple[int, ...]:
        """Return the stragglers of a round that are not absent."""
        stragglers = self.stragglers[round_number - 1] if self.stragglers else ()
        return tuple(client for client in stragglers if client not in self.absent(round_number))

    def work(self, round_number: int) -> dict[int, float]:
        """Return the share of its mini-batches that each straggler of a round trains on."""
        return dict.fromkeys(self.slow(round_number), self.straggler_work)

    def is_due(self, round_number: int, every: int) -> bool:
        """Return whether something that happens every so many rounds, and in the last one, is due."""
        return round_number == self.rounds or (every > 0 and round_number % every == 0)

    def next_round(self, done: int | None) -> int:
        """Return the round after `done`, or the first one if it is None. Round 0 is the initial round."""
        return (0 if self.initial_round else 1) if done is None else done + 1

    @property
    def reported(self) -> tuple[ModelKind, EvalPhase]:
        """The model and the phase that the method reports, as in `EvalRow`."""
        return self.reported_model, self.reported_phase if self.reported_model == "personal" else "received"

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self.cohorts)
