"""The round loop: the one place that knows the order of events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

from pflsim.checkpoint import write_checkpoint
from pflsim.execution import Executor, Judge, Sent, Trained
from pflsim.trace import write_message, write_server
from pflsim.types import EvalRow, NewcomerRecord, RoundRecord, Split

Handle = TypeVar("Handle")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is decided before the first round.

    Args:
        method: its name.
        cohorts: who takes part, round by round.
        clients: N, those that train.
        splits: which splits are judged: test, and val where there is one.
        judged_phase: when a personal model is judged.
        received: judge personal models both as received and after local training.
        eval_every: evaluate every so many rounds, and in the last.
        eval_all: judge all clients, not only those of the round.
        trace_rounds: rounds whose messages are written out.
        checkpoint_every, checkpoint_keep: as in the settings.
        opening: all clients reply once before round 1.
        header: what a checkpoint says of the run.
        units: names of the fusion units, in their order, for the trace.
        newcomers: clients that join after the last round.
        finetune_epochs: how long they then train.
    """

    method: str
    cohorts: tuple[tuple[int, ...], ...]
    clients: int
    splits: tuple[Split, ...] = ("test",)
    judged_phase: Literal["trained", "received"] = "trained"
    received: bool = False
    eval_every: int = 1
    eval_all: bool = True
    trace_rounds: tuple[int, ...] = ()
    checkpoint_every: int = 0
    checkpoint_keep: int = 1
    opening: bool = False
    header: Mapping[str, str | int] | None = None
    units: tuple[str, ...] = ()
    newcomers: tuple[int, ...] = ()
    finetune_epochs: int = 1

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        return len(self.cohorts)


class Listener(Protocol):
    """Whoever wants to hear of every round."""

    def round(self, record: RoundRecord) -> None:
        """A round is over."""
        ...

    def newcomers(self, record: NewcomerRecord) -> None:
        """Newcomers have joined, after the last round; not called where the plan has none."""
        ...


class Simulation(Generic[Handle]):
    """Runs a plan on an executor and tells a listener.

    Args:
        executor: runs clients and server; already started.
        plan: what to do.
        folder: the run folder, for trace/ and checkpoints/.
        listener: hears of every round.
    """

    def __init__(self, executor: Executor[Handle], plan: Plan, folder: Path, listener: Listener):
        self.executor, self.plan, self.folder, self.listener = executor, plan, folder, listener

    def run(self) -> None:
        """All rounds; round 0 is the opening, where the method has one. Then newcomers join, where there are any."""
        if self.plan.opening:
            self.listener.round(self._opening())
        for round_number, cohort in enumerate(self.plan.cohorts, start=1):
            self.listener.round(self._round(round_number, cohort))
        if self.plan.newcomers:
            self.listener.newcomers(self._welcome())

    def _round(self, round_number: int, cohort: tuple[int, ...]) -> RoundRecord:
        seconds: dict[str, float] = {}
        with _timed(seconds, "downlink"):
            sent = self.executor.send(cohort)
        with _timed(seconds, "train"):
            trained = self.executor.train(round_number, sent)
        with _timed(seconds, "fuse"):
            self.executor.fuse(trained)
        if round_number in self.plan.trace_rounds:
            with _timed(seconds, "trace"):
                self._trace(round_number, sent, trained)
        down_bytes, reports = sent.down_bytes, trained.reports
        del sent, trained  # the messages may go now
        with _timed(seconds, "evaluate"):
            rows = self._evaluate(round_number, cohort)
        if self._is_due(round_number, self.plan.checkpoint_every):
            with _timed(seconds, "checkpoint"):
                self._save(round_number)
        return RoundRecord(round_number, cohort, reports, down_bytes, rows, seconds)

    def _opening(self) -> RoundRecord:
        seconds: dict[str, float] = {}
        everyone = tuple(range(self.plan.clients))
        with _timed(seconds, "opening"):
            replied = self.executor.open(everyone)
            self.executor.fuse(replied)
        if 0 in self.plan.trace_rounds:
            self._trace(0, Sent({}, {}), replied)
        return RoundRecord(0, everyone, replied.reports, {}, (), seconds)

    def _welcome(self) -> NewcomerRecord:
        plan = self.plan
        sent = self.executor.join(plan.newcomers)
        judge = Judge("personal", "received", plan.newcomers, plan.splits, plan.rounds, joining=True)
        received = self.executor.evaluate(judge, sent)
        self.executor.finetune(plan.rounds + 1, sent, plan.finetune_epochs)
        down_bytes = sent.down_bytes
        del sent  # the messages may go now
        trained = self.executor.evaluate(replace(judge, phase="trained"))
        return NewcomerRecord(plan.rounds, down_bytes, tuple(received), tuple(trained))

    def _is_due(self, round_number: int, every: int) -> bool:
        return round_number == self.plan.rounds or (every > 0 and round_number % every == 0)

    def _evaluate(self, round_number: int, cohort: tuple[int, ...]) -> tuple[EvalRow, ...]:
        plan = self.plan
        if not self._is_due(round_number, plan.eval_every):
            return ()
        who = tuple(range(plan.clients)) if plan.eval_all else cohort
        judges = [
            Judge("personal", plan.judged_phase, who, plan.splits, round_number),
            Judge("global", "received", who, plan.splits, round_number),
        ]
        if plan.received:
            other = "trained" if plan.judged_phase == "received" else "received"
            judges.insert(1, Judge("personal", other, who, plan.splits, round_number))
        return tuple(row for judge in judges for row in self.executor.evaluate(judge))

    def _trace(self, round_number: int, sent: Sent[Handle], trained: Trained[Handle]) -> None:
        method, folder = self.plan.method, self.folder
        examples: dict[int, int] = {}
        for handle in trained.uplinks:
            for up in self.executor.uplinks(handle):
                examples[up.client] = up.num_examples
                write_message(folder, round_number, "up", up.client, up, method, up.num_examples)
        for client, handle in sent.downlinks.items():
            message = self.executor.downlink(handle)
            write_message(folder, round_number, "down", client, message, method, examples.get(client, 0))
        write_server(
            folder, round_number, self.executor.server_numbers(), {"method": method, "units": ",".join(self.plan.units)}
        )

    def _save(self, round_number: int) -> None:
        write_checkpoint(
            self.folder / "checkpoints",
            round_number,
            self.executor.server_state(),
            self.executor.client_states(),
            {"method": self.plan.method, **(self.plan.header or {})},
            self.plan.checkpoint_keep,
        )


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
