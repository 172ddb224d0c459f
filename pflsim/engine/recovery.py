"""Going on after part of what a run stood on is gone: the state after the last whole round is worked out again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from pflsim.engine.execution import Executor, NodeLost
from pflsim.engine.plan import RunPlan
from pflsim.errors import RunError, SettingsError
from pflsim.run_folder.checkpoint import newest_checkpoint
from pflsim.run_folder.journal import Journal
from pflsim.types import RoundRecord

Handle = TypeVar("Handle")
MOST = 10
"""So many losses, without anything coming of it in between, are no accidents."""


class Recovery(Generic[Handle]):
    """Knows which round's state the executor has, and how to bring back that of the last whole round.

    What is lost is worked out again from the last checkpoint on, or from the beginning. Everything follows from the
    seed, so it comes out as it was, and the records of those rounds stay as they are.

    Args:
        executor, plan, folder, journal: of the run.
        phase: is told which round is gone through again.
        done: the last round that is done when the session begins; None: not even the opening is.
    """

    def __init__(
        self,
        executor: Executor[Handle],
        plan: RunPlan,
        folder: Path,
        journal: Journal,
        phase: Callable[[int, str, int], None],
        done: int | None,
    ):
        self._executor, self._plan, self._folder, self._journal, self._phase = executor, plan, folder, journal, phase
        self._first: int | None = None
        self._unheard: dict[int, frozenset[int]] = {}
        self._idle: dict[int, frozenset[int]] = {}
        self._done = self._at = done
        self.complete = True
        """Whether the executor has the state after the last whole round, or one beyond it."""

    def note(self, record: RoundRecord) -> None:
        """A round is done; the record has all its faults."""
        self._done = self._at = record.round
        self._first = record.round if self._first is None else self._first
        if unheard := frozenset(record.cohort).difference(report.client for report in record.reports):
            spoilt = {client for client, kind in record.faults.items() if kind == "nonfinite"}
            self._unheard[record.round], self._idle[record.round] = unheard, unheard - spoilt

    def bring_back(self) -> None:
        """Have the executor go on with what is left, in the state after the last whole round.

        Raises:
            RunError: what is left is not enough, or what was lost cannot be worked out.
        """
        self.complete, losses = False, 0
        while not self.complete:
            try:
                if not self._recovered():
                    self._at = None
                if self._at is None and self._done is not None:
                    self._at = self._restored()
                while self._at != self._done:
                    self._repeat(self._plan.following(self._at))
                self.complete = True
            except NodeLost as loss:
                losses += 1
                if losses == MOST:
                    raise RunError(f"{loss} (the {MOST}th loss while states were brought back)") from None
                self._journal.restarted(f"{loss}; going on with what is left")

    def _recovered(self) -> bool:
        """See `Executor.recover`; where there is not enough left, the states that there are can be saved still."""
        try:
            return self._executor.recover()
        except NodeLost:
            raise
        except RunError:
            self.complete = self._at == self._done
            raise

    def _restored(self) -> int | None:
        """Give the executor, which is at the beginning, the newest state that is saved; returns its round."""
        folder = self._folder / "checkpoints"
        try:
            found = newest_checkpoint(folder, self._journal.say, self._done)
        except SettingsError as error:
            raise RunError(f"states were lost with a node, and no checkpoint can be used: {error}") from error
        at = None if found is None else found.round
        first = self._plan.following(at)
        if at != self._done and (self._first is None or first < self._first):
            raise RunError(
                f"states were lost with a node, and those of round {self._done} cannot be worked out again: there is "
                f"no checkpoint of this session in {folder}"
            )
        if found is not None:
            self._executor.restore(found.server(), found.clients())
        since = "the beginning" if found is None else f"{found.path}"
        again = "" if at == self._done else f"; rounds {first} to {self._done} are gone through again"
        self._journal.say(f"states were lost with a node, the run goes on from {since}{again}")
        return at

    def _repeat(self, round_number: int) -> None:
        """Go through a round that is in the records, with those whose replies were fused then.

        Whoever was left out since it raised an error is left out from the start, as the others then worked without it.
        One whose values were not finite has worked together with others perhaps, and does so again.
        """
        plan, executor = self._plan, self._executor
        cohort = plan.cohorts[round_number - 1] if round_number else tuple(range(plan.clients))
        heard = [client for client in cohort if client not in self._unheard.get(round_number, ())]
        idle = self._idle.get(round_number, frozenset())
        self._phase(round_number, "again", len(cohort) - len(idle))
        if round_number == 0:
            trained = executor.open(heard)
        else:
            sent = executor.send(cohort).without(idle)
            trained = executor.train(round_number, sent, plan.work(round_number))
        if other := {report.client for report in trained.reports}.symmetric_difference(heard):
            raise RunError(
                f"states were lost with a node, and round {round_number} does not come out again as it is in the "
                f"records: client{'s' * (len(other) > 1)} {', '.join(map(str, sorted(other)))} replied one time only"
            )
        executor.fuse(trained)
        executor.confirm()
        self._at = round_number
