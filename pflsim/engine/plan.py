"""What is decided before the first round of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pflsim.config.settings import Settings
from pflsim.engine.clock import VirtualClock
from pflsim.records.summary import RunMeta
from pflsim.tasks.metrics import Metric
from pflsim.types import Split


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What is decided before the first round.

    Args:
        meta: describes the run; it has the method and the model that it reports.
        cohorts: the clients of each round.
        clients: N, the number of clients that train.
        settings: of the run.
        splits: the splits to evaluate: test, and val if there is one.
        sets: the test sets on which clients that train are judged besides.
        initial_round: all clients reply once before round 1.
        surveys: rounds before which all clients reply once more.
        header: metadata of the run for checkpoints.
        units: names of the fusion units in their order, for the trace.
        newcomers: clients that join after the last round.
        few: those of them that have as many training rows, by each number of `eval.newcomer_rows`.
        absentees, stragglers: clients of each round's cohort; empty: none in any round.
        metrics: to compute over the examples of all clients together.
        recorded_rows: numbers of each client's test rows in the user's files; (): their scores are not recorded.
        malicious: clients that attack, or would, and are not evaluated.
        clock: the virtual clock; None: there is none.
        save_best: a round that improves the validation score has a checkpoint.
        adapts: the reported model is adapted to each client's examples, so checkpoints store it.
    """

    meta: RunMeta
    cohorts: tuple[tuple[int, ...], ...]
    clients: int
    settings: Settings = field(default_factory=Settings)
    splits: tuple[Split, ...] = ("test",)
    sets: tuple[Split, ...] = ()
    initial_round: bool = False
    surveys: frozenset[int] = frozenset()
    header: Mapping[str, Any] = field(default_factory=dict)
    units: tuple[str, ...] = ()
    newcomers: tuple[int, ...] = ()
    few: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    absentees: tuple[tuple[int, ...], ...] = ()
    stragglers: tuple[tuple[int, ...], ...] = ()
    malicious: frozenset[int] = frozenset()
    clock: VirtualClock | None = None
    save_best: bool = False
    adapts: bool = False
    metrics: tuple[Metric, ...] = ()
    recorded_rows: tuple[np.ndarray, ...] = ()

    def absent(self, round_number: int) -> tuple[int, ...]:
        """Return the clients of a round's cohort that do not take part."""
        return self.absentees[round_number - 1] if self.absentees else ()

    def slow(self, round_number: int) -> tuple[int, ...]:
        """Return the stragglers of a round that are not absent."""
        stragglers = self.stragglers[round_number - 1] if self.stragglers else ()
        return tuple(client for client in stragglers if client not in self.absent(round_number))

    def work(self, round_number: int) -> dict[int, float]:
        """Return the share of its mini-batches that each straggler of a round trains on."""
        return dict.fromkeys(self.slow(round_number), self.settings.faults.straggler_work)

    def is_due(self, round_number: int, every: int) -> bool:
        """Return whether something that happens every so many rounds, and in the last one, is due."""
        return round_number == self.rounds or (every > 0 and round_number % every == 0)

    def next_round(self, done: int | None) -> int:
        """Return the round after `done`, or the first one if it is None. Round 0 is the initial round."""
        return (0 if self.initial_round else 1) if done is None else done + 1

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self.cohorts)
