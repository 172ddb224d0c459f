"""What is decided of a run before its first round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pflsim.types import Split


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What is decided before the first round.

    Args:
        method: its name.
        cohorts: who takes part, round by round.
        clients: N, those that train.
        splits: which splits are judged: test, and val where there is one.
        reported_phase: when a personal model is judged.
        received: judge personal models both as received and after local training.
        eval_every: evaluate every so many rounds, and in the last.
        eval_all: judge all clients, not only those of the round.
        trace_rounds: rounds whose messages are written out.
        checkpoint_every, checkpoint_seconds, checkpoint_keep: as in the settings, minutes as seconds.
        initial_round: all clients reply once before round 1.
        header: what a checkpoint says of the run.
        units: names of the fusion units, in their order, for the trace.
        newcomers: clients that join after the last round.
        finetune_epochs: how long they then train.
        reported_model: the model that the method is judged by.
        absentees, stragglers: round by round, of the cohort; empty: none in any round.
        straggler_work: the share of its work that a straggler does.
        diagnostics_every: make matrices to look at every so many rounds, and in the last.
        classes: C; 0: nothing is counted by class.
    """

    method: str
    cohorts: tuple[tuple[int, ...], ...]
    clients: int
    splits: tuple[Split, ...] = ("test",)
    reported_phase: Literal["trained", "received"] = "trained"
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
    reported_model: Literal["personal", "global"] = "personal"
    absentees: tuple[tuple[int, ...], ...] = ()
    stragglers: tuple[tuple[int, ...], ...] = ()
    straggler_work: float = 0.5
    diagnostics_every: int = 10
    classes: int = 0

    def absent(self, round_number: int) -> tuple[int, ...]:
        """Who of a round's cohort is not heard of."""
        return self.absentees[round_number - 1] if self.absentees else ()

    def slow(self, round_number: int) -> tuple[int, ...]:
        """Who of those that are heard of does a share of its work."""
        here = self.stragglers[round_number - 1] if self.stragglers else ()
        return tuple(client for client in here if client not in self.absent(round_number))

    def work(self, round_number: int) -> dict[int, float]:
        """The share of its work that each of those does."""
        return dict.fromkeys(self.slow(round_number), self.straggler_work)

    def following(self, done: int | None) -> int:
        """The round after one, or the first one; round 0 is the opening."""
        return (0 if self.initial_round else 1) if done is None else done + 1

    @property
    def reported(self) -> tuple[str, str]:
        """Which model is judged, and when: as in `EvalRow`."""
        return self.reported_model, self.reported_phase if self.reported_model == "personal" else "received"

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        return len(self.cohorts)
