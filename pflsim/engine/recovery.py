"""Recovery from lost nodes: restores the states after the last finished round."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic

from pflsim.engine.execution import Executor, Handle, NodeLost, ReplyTask, Sent, TrainTask
from pflsim.engine.plan import RunPlan
from pflsim.errors import RunError
from pflsim.records.checkpoint_read import newest_checkpoint
from pflsim.types import RoundRecord

logger = logging.getLogger(__name__)
Announce = Callable[[int, str, int], None]
LOST = "states were lost with a node"
MAX_NODE_LOSSES = 10
"""Losses in one round after which the run ends."""


class Recovery(Generic[Handle]):
    """Restores the states after the last finished round when a node is lost.

    Lost states are computed again from the last checkpoint, or from the beginning of the run. All random numbers
    follow from the seed, so the result is the same, and the records of these rounds remain valid.

    Args:
        executor, plan, folder: of the run.
        phase: called with (round, "again", number of clients) for each round that is repeated.
        done: the last finished round when the session begins; None: no round.

    Attributes:
        complete: whether the executor has the states after the last finished round, or after a later one.
    """

    def __init__(self, executor: Executor[Handle], plan: RunPlan, folder: Path, phase: Announce, done: int | None):
        self._executor, self._plan, self._folder, self._phase = executor, plan, folder, phase
        self._resumed_after = self._done = self._current = done
        self._no_reply: dict[int, frozenset[int]] = {}
        self._not_sent: dict[int, frozenset[int]] = {}
        self.complete = True

    def add(self, record: RoundRecord) -> None:
        """Add the record of a finished round."""
        self._done = self._current = record.round
        if no_reply := frozenset(record.cohort).difference(report.client for report in record.reports):
            nonfinite = {client for client, kind in record.faults.items() if kind == "nonfinite"}
            self._no_reply[record.round], self._not_sent[record.round] = no_reply, no_reply - nonfinite

    def recover(self) -> None:
        """Continue on other nodes with the states after the last finished round.

        Raises:
            NodeLost: another node is lost; call it again.
            RunError: the other nodes have no room, or the lost states cannot be computed again.
        """
        self.complete = False
        try:
            if not self._executor.recover():
                self._current = None
            if self._current is None and self._done is not None:
                self._current = self._load_checkpoint()
            while self._current != self._done:
                self._repeat(self._plan.next_round(self._current))
            self.complete = True
        except NodeLost:
            raise
        except RunError:
            self.complete = self._current == self._done  # intact states can still be saved
            raise

    def _load_checkpoint(self) -> int | None:
        """Load the newest usable checkpoint into the executor, and return its round; None: there is none."""
        folder = self._folder / "checkpoints"
        found = newest_checkpoint(folder, logger.warning, self._done)
        current = None if found is None else found.round
        first = self._plan.next_round(current)
        if first < self._plan.next_round(self._resumed_after):
            why = f"there is no checkpoint of this session in {folder}"
            raise RunError(f"{LOST}, and those of round {self._done} cannot be computed again: {why}")
        if found is not None:
            self._executor.restore(found.server(), found.clients())
        start = "the beginning" if found is None else f"{found.path}"
        repeated = "" if current == self._done else f"; rounds {first} to {self._done} are repeated"
        logger.warning(f"{LOST}, the run continues from {start}{repeated}")
        return current

    def _repeat(self, round_number: int) -> None:
        """Repeat a recorded round with the clients whose replies were fused.

        A client that was dropped because of an error gets no message, because the others of its stack then trained
        without it. A client with values that are not finite trained with its stack, so it trains again.
        """
        plan, executor = self._plan, self._executor
        cohort = plan.cohorts[round_number - 1] if round_number else tuple(range(plan.clients))
        replied = [client for client in cohort if client not in self._no_reply.get(round_number, ())]
        not_sent = self._not_sent.get(round_number, frozenset())
        self._phase(round_number, "again", len(cohort) - len(not_sent))
        if round_number == 0:
            trained = executor.run(ReplyTask(), Sent.nothing(replied))
        else:
            if round_number in plan.surveys:
                executor.fuse(executor.run(ReplyTask(round_number), executor.send(tuple(range(plan.clients)))))
            sent = executor.send(cohort).without(not_sent)
            trained = executor.run(TrainTask(round_number, plan.work(round_number)), sent)
        if other := {report.client for report in trained.reports}.symmetric_difference(replied):
            clients = f"client{'s' * (len(other) > 1)} {', '.join(map(str, sorted(other)))}"
            what = f"differs from its record: {clients} replied in only one of the two"
            raise RunError(f"{LOST}, and the repeated round {round_number} {what}")
        executor.fuse(trained)
        executor.commit()
        self._current = round_number
