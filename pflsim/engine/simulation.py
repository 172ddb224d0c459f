"""The rounds of a run: the only module that knows the order of events."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

import torch

from pflsim.engine.callbacks import Callbacks
from pflsim.engine.checkpointing import Checkpointer
from pflsim.engine.diagnostics import mean_confusion
from pflsim.engine.execution import (
    EvalRequest,
    Executor,
    FinetuneTask,
    NodeLost,
    ReplyTask,
    Sent,
    StatesLost,
    Trained,
    TrainTask,
)
from pflsim.engine.interrupts import Interrupts
from pflsim.engine.plan import RunPlan
from pflsim.errors import RunError
from pflsim.records.evaluation import grouped, validation_score
from pflsim.records.history import stalled_since
from pflsim.records.predictions import Predictions, updated
from pflsim.records.trace import write_trace
from pflsim.seeding import evaluated
from pflsim.tasks.thresholds import decided
from pflsim.types import EvalPhase, EvalRow, Fault, ModelKind, NewcomerRecord, RoundRecord, Split, Traffic

logger = logging.getLogger(__name__)
Handle = TypeVar("Handle")
Result = TypeVar("Result")
MAX_NODE_LOSSES = 10
"""Losses in one round after which the run ends."""


class Listener(Protocol):
    """Is called by a `Simulation` as it proceeds."""

    def round(self, record: RoundRecord) -> None:
        """Handle the end of a round."""

    def phase(self, round_number: int, name: str, due: int = 0) -> None:
        """Handle the start of a phase in which `due` clients work."""

    def clients_done(self, clients: int) -> None:
        """Handle that this number of clients has finished the phase's work."""

    def newcomers(self, record: NewcomerRecord) -> None:
        """Handle the results of newcomers, after the last round."""

    def sync(self) -> None:
        """Write all records to the disk; a checkpoint of these rounds becomes visible next."""


class Simulation(Generic[Handle]):
    """Runs the rounds of a plan on an executor.

    Args:
        executor: runs clients and server; already started.
        plan: what to do.
        folder: the run folder, for traces and checkpoints.
        listener: called as the run proceeds.
        interrupts: tells when to stop.
        done: the last finished round if the run resumes; the executor has the states after it.
        scores: validation score of the reported model by finished round, for early stopping.
        callbacks: of the user.
        predictions: those of the checkpoint from which the run resumes.

    Attributes:
        stopped: which callback ended the run, or "".
    """

    def __init__(
        self,
        executor: Executor[Handle],
        plan: RunPlan,
        folder: Path,
        listener: Listener,
        interrupts: Interrupts | None = None,
        done: int | None = None,
        scores: Mapping[int, float] | None = None,
        callbacks: Callbacks | None = None,
        predictions: Predictions | None = None,
    ):
        self.executor, self.plan, self.folder, self.listener = executor, plan, folder, listener
        self.interrupts, self.done = interrupts or Interrupts(), done
        executor.clients_done = listener.clients_done
        self._checkpoints = Checkpointer(executor, plan, folder, listener.sync, done)
        self.callbacks, self.stopped = callbacks or Callbacks(), ""
        self._score: float | None = None
        self._scores, self._predictions = dict(scores or {}), predictions or {}
        self._ahead = False
        """Whether the executor's states are those of a round without a record."""

    def run(self) -> None:
        """Run all rounds that are left, or until early stopping, then let the newcomers join.

        Raises:
            KeyboardInterrupt: a signal asked for it; the states after the last finished round are saved, except after
                a second signal.
            Exception: the run failed; these states are saved if that is possible, so not after `StatesLost`.
        """
        try:
            while not self._ends and (round_number := self.plan.next_round(self.done)) <= self.plan.rounds:
                self._repeat_after_losses(partial(self._run_round, round_number))
            if self.plan.newcomers:
                assert self.done is not None
                self.listener.phase(self.done, "newcomers")
                self.listener.newcomers(self._repeat_after_losses(partial(self._join, self.done)))
        except (Exception, KeyboardInterrupt) as error:
            if self.interrupts.count < 2 and not isinstance(error, StatesLost):
                self._save_last_round()
            raise

    @property
    def _ends(self) -> bool:
        """Whether the run ends here because of a callback, or its validation accuracy has stopped improving."""
        return bool(self.stopped) or stalled_since(self._scores, self.plan.settings.stop.patience) is not None

    @property
    def _scored(self) -> tuple[Split, ...]:
        """The splits of which evaluations return the scores."""
        plan, thresholds = self.plan, self.plan.settings.eval.sensitivity is not None
        return plan.splits if thresholds else ("test",) * bool(plan.metrics or plan.recorded_rows)

    @property
    def states_saved(self) -> bool:
        """Whether a checkpoint has the states after the last finished round."""
        return self.done == self._checkpoints.saved

    def _run_round(self, round_number: int) -> None:
        self._finish(self._round(round_number) if round_number else self._initial_round())

    def _round(self, round_number: int) -> RoundRecord:
        """Train the cohort, fuse its uplinks, and evaluate."""
        plan, executor, seconds = self.plan, self.executor, dict[str, float]()
        phase = partial(self._phase, round_number, seconds)
        surveyed = self._survey(round_number, phase) if round_number in plan.surveys else {}
        cohort, absent, slow = plan.cohorts[round_number - 1], plan.absent(round_number), plan.slow(round_number)
        with self.interrupts.abandonable():
            with phase("downlink"):
                sent = executor.send(cohort)
            with phase("train", len(cohort) - len(absent)):
                trained = executor.run(TrainTask(round_number, plan.work(round_number)), sent.without(absent))
        with phase("fuse"):
            diagnostics = executor.fuse(trained, plan.is_due(round_number, plan.settings.tracking.diagnostics_every))
            self._ahead = True
        seconds |= {"fuse": seconds["fuse"] - diagnostics.seconds, "diagnostics": diagnostics.seconds}
        if round_number in plan.settings.trace.rounds:
            with phase("trace"):
                self._trace(round_number, sent, trained)
        down_bytes, reports = sent.down_bytes, trained.reports
        del sent, trained  # free the messages before the evaluation
        with phase("evaluate"):
            rows = self._evaluate(round_number, cohort)
            rows, shares = decided(rows, plan.settings.eval.sensitivity)
            pooled = self._pooled(rows)
            for scope, values in shares.items():
                pooled[scope] |= values
        faults: dict[int, Fault] = {**dict.fromkeys(slow, "straggler"), **dict.fromkeys(absent, "dropout")}
        reported = [row for row in rows if (row.model, row.split, row.phase) == plan.meta.reported]
        confusion = mean_confusion(reported, plan.meta.classes)
        drift, matrices = diagnostics.drift, (*diagnostics.matrices, *([confusion] if confusion else []))
        virtual = plan.clock and plan.clock.round(reports, down_bytes, surveyed)
        return RoundRecord(
            round_number, cohort, reports, down_bytes, tuple(rows), seconds, faults, drift, matrices, pooled, surveyed,
            virtual,
        )  # fmt: skip

    def _survey(self, round_number: int, phase: Callable[..., AbstractContextManager[None]]) -> dict[int, Traffic]:
        """Fuse the replies of all clients to their downlinks before a round; returns the traffic of each client."""
        executor, clients = self.executor, tuple(range(self.plan.clients))
        with phase("survey", len(clients)):
            with self.interrupts.abandonable():
                sent = executor.send(clients)
                replied = executor.run(ReplyTask(round_number), sent)
            executor.fuse(replied)
            self._ahead = True
        up = {report.client: report.up_bytes for report in replied.reports}
        return {client: Traffic(up.get(client, 0), sent.down_bytes[client]) for client in clients}

    def _initial_round(self) -> RoundRecord:
        """Fuse the replies of all clients before any training (round 0)."""
        seconds: dict[str, float] = {}
        clients = tuple(range(self.plan.clients))
        with self._phase(0, seconds, "initial round", len(clients)):
            with self.interrupts.abandonable():
                replied = self.executor.run(ReplyTask(), Sent.nothing(clients))
            self.executor.fuse(replied)
            self._ahead = True
        if 0 in self.plan.settings.trace.rounds:
            self._trace(0, Sent({}, {}), replied)
        virtual = self.plan.clock and self.plan.clock.round(replied.reports, {}, {})
        return RoundRecord(0, clients, replied.reports, {}, (), seconds, virtual_seconds=virtual)

    def _evaluate(self, round_number: int, cohort: tuple[int, ...]) -> tuple[EvalRow, ...]:
        plan = self.plan
        if not plan.is_due(round_number, plan.settings.eval.every):
            return ()
        drawn = evaluated(plan.settings.eval.clients, plan.meta.seed, plan.clients, cohort)
        clients = tuple(client for client in drawn if client not in plan.malicious)
        phase = plan.meta.reported_phase
        models: list[tuple[ModelKind, EvalPhase]] = [("personal", phase), ("global", "received")]
        if plan.settings.eval.received:
            models.insert(1, ("personal", "trained" if phase == "received" else "received"))
        diagnosed = plan.is_due(round_number, plan.settings.tracking.diagnostics_every)
        rows, scored = list[EvalRow](), self._scored
        for model, phase in (each for each in models if each[0] in plan.settings.eval.models):
            self.listener.phase(round_number, "evaluate", len(clients))
            counts = diagnosed and (model, "test", phase) == plan.meta.reported
            splits = (*plan.splits, *(plan.sets if phase == plan.meta.phase(model) else ()))
            request = EvalRequest(model, phase, clients, splits, round_number, confusion=counts, pooled=scored)
            rows += self.executor.evaluate(request)
        return tuple(rows)

    def _pooled(self, rows: Sequence[EvalRow]) -> dict[tuple[str, str, str], dict[str, float]]:
        """Return metrics over the examples of all clients together, by model, split and phase."""
        found = grouped(((row.model, row.split, row.phase), row.outcomes) for row in rows if row.outcomes is not None)
        values = dict[tuple[str, str, str], dict[str, float]]()
        for scope, parts in found.items():
            scores, targets = map(torch.cat, zip(*parts, strict=True))
            named = ((metric.name, metric(scores, targets)) for metric in self.plan.metrics)
            values[scope] = {name: value for name, value in named if value is not None}
        return values

    def _trace(self, round_number: int, sent: Sent[Handle], trained: Trained[Handle]) -> None:
        write, method = partial(write_trace, self.folder, round_number), {"method": self.plan.meta.method}
        for handle in trained.uplinks:
            for up in self.executor.uplinks(handle):
                write(f"up_{up.client:03d}", up, {**method, "client": up.client, "num_examples": up.num_examples})
        for client, handle in sent.downlinks.items():
            assert handle is not None
            write(f"down_{client:03d}", self.executor.downlink(handle), {**method, "client": client})
        write("server", self.executor.server_numbers(), {**method, "units": ",".join(self.plan.units)})

    def _finish(self, record: RoundRecord) -> None:
        """Record a round, save a checkpoint if it is due, and stop if a signal asked for it.

        The checkpoint is written before the record and becomes visible after it, so that the records of a visible
        checkpoint's rounds are complete.
        """
        score = validation_score(record.evaluations, self.plan.meta.reported, self.plan.meta.measures)
        seconds, staged, best, plan = dict(record.seconds), None, False, self.plan
        if score is not None:
            before = (each for number, each in self._scores.items() if number < record.round and not math.isnan(each))
            best = score > max(before, default=-math.inf)
            self._scores[record.round] = score
        rows, numbers = record.evaluations, plan.recorded_rows
        predictions = updated(self._predictions, record.round, rows, numbers, plan.meta.task, best)
        if self._ends or (best and plan.save_best) or self._checkpoints.is_due(record.round):
            with self._phase(record.round, seconds, "checkpoint"):
                staged = self._checkpoints.stage(record.round, score, predictions, adapted=True)
        faults, rows = {**record.faults, **self.executor.faults.take()}, (replace(row, outcomes=None) for row in rows)
        record = replace(record, seconds=seconds, faults=faults, evaluations=tuple(rows))
        self.listener.round(record)
        self.done, self._score, self._predictions, self._ahead = record.round, score, predictions, False
        self.executor.commit()
        if staged is not None:
            self._checkpoints.publish(staged)
        self.stopped = self.callbacks.round(record)
        if self.stopped and staged is None:
            last = self._checkpoints.stage(record.round, score, predictions, adapted=True)
            if last is not None:
                self._checkpoints.publish(last)
        if self.interrupts.requested is not None:
            raise KeyboardInterrupt

    def _join(self, last: int) -> NewcomerRecord:
        """Evaluate newcomers with their first downlink after the last round, fine-tune and evaluate them again."""
        plan, executor = self.plan, self.executor
        with self.interrupts.abandonable():
            sent = executor.send(plan.newcomers, joining=True)
            request = EvalRequest("personal", "received", plan.newcomers, plan.splits, last, joining=True)
            received = self._evaluate_newcomers(request, sent)
            self._ahead = True  # the newcomers' states are not part of the last round's checkpoint
            few = tuple(self._with_few_rows(request, sent))
            executor.store(executor.run(FinetuneTask(last + 1, plan.settings.eval.finetune_epochs), sent))
            down_bytes = sent.down_bytes
            del sent  # free the messages before the evaluation
            trained = self._evaluate_newcomers(replace(request, phase="trained"))
        return NewcomerRecord(last, down_bytes, tuple(received), tuple(trained), few)

    def _evaluate_newcomers(self, request: EvalRequest, sent: Sent[Handle] | None = None) -> list[EvalRow]:
        rows = self.executor.evaluate(replace(request, pooled=self._scored), sent)
        return decided(rows, self.plan.settings.eval.sensitivity)[0]

    def _with_few_rows(self, request: EvalRequest, sent: Sent[Handle]) -> Iterator[EvalRow]:
        """Yield evaluations of newcomers as received on all of their rows, and after few training rows."""
        executor, plan = self.executor, self.plan

        def named(phase: str, rows: Sequence[EvalRow]) -> Iterator[EvalRow]:
            return (replace(row, phase=cast(EvalPhase, phase)) for row in rows)

        if plan.few:
            whole = self._evaluate_newcomers(replace(request, splits=("all",)), sent)
            yield from (replace(row, split="test") for row in named("received_all", whole))
        for number, clients in plan.few.items():
            if clients:
                own = sent.without({*plan.newcomers} - {*clients})
                asked = replace(request, clients=clients, rows=number)
                if plan.meta.recalibrates:
                    found = self._evaluate_newcomers(replace(asked, recalibrate=True), own)
                    yield from named(f"recalibrated_{number}", found)
                task = FinetuneTask(request.round_number + 1, plan.settings.eval.finetune_epochs, number)
                executor.store(executor.run(task, own))
                yield from named(f"trained_{number}", self._evaluate_newcomers(replace(asked, phase="trained")))
                executor.rollback()

    def _repeat_after_losses(self, work: Callable[[], Result]) -> Result:
        """Do the work; if a node is lost, do it again with the states after the last finished round.

        Raises:
            StatesLost: these states are lost, too.
        """
        reason = ""
        for _ in range(MAX_NODE_LOSSES):
            try:
                if reason:
                    with self.interrupts.abandonable():
                        self.executor.recover()
                    self.executor.faults.take()  # those of the round that is repeated
                return work()
            except NodeLost as loss:
                reason = str(loss)  # not the error itself, which would keep the round's messages alive
            logger.warning(f"{reason}; the run continues when other nodes have room")
            self.executor.faults.count_restart()
            if self._ahead:
                self.executor.rollback()
                self._ahead = False
        raise RunError(f"{reason} (the {MAX_NODE_LOSSES}th loss in one round)")

    def _save_last_round(self) -> None:
        """Save the states after the last finished round, unless they are saved."""
        if self.done is None or self.states_saved:
            return
        try:
            if self._ahead:
                self.executor.rollback()
            if (staged := self._checkpoints.stage(self.done, self._score, self._predictions)) is not None:
                self._checkpoints.publish(staged)
        except RunError as error:  # the error that ends the run may also prevent this
            logger.warning(f"the state after round {self.done} is not saved: {error}")

    @contextmanager
    def _phase(self, round_number: int, seconds: dict[str, float], name: str, due: int = 0) -> Iterator[None]:
        """Announce a phase, and measure its time."""
        self.listener.phase(round_number, name, due)
        start = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start
