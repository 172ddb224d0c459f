"""The round loop: the one place that knows the order of events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from pflsim.engine.diagnostics import RoundDiagnostics, mean_confusion
from pflsim.engine.execution import EvalRequest, Executor, NodeLost, Sent, Trained
from pflsim.engine.interrupts import Interrupts, Stopped
from pflsim.engine.plan import RunPlan
from pflsim.engine.recovery import MOST, Recovery
from pflsim.errors import RunError
from pflsim.run_folder.checkpoint import Staged, stage_checkpoint
from pflsim.run_folder.journal import Journal
from pflsim.run_folder.metrics import validation_score
from pflsim.run_folder.trace import write_message, write_server
from pflsim.types import EvalRow, Fault, Matrix, NewcomerRecord, RoundRecord

Handle = TypeVar("Handle")
Result = TypeVar("Result")


class Listener(Protocol):
    """Whoever wants to hear of every round."""

    def round(self, record: RoundRecord) -> None:
        """A round is over."""
        ...

    def phase(self, round_number: int, name: str, due: int = 0) -> None:
        """A phase of a round begins, in which so many clients have something to do."""
        ...

    def clients_done(self, clients: int) -> None:
        """So many more of them are through with it."""
        ...

    def newcomers(self, record: NewcomerRecord) -> None:
        """Newcomers have joined, after the last round; not called where the plan has none."""
        ...

    def sync(self) -> None:
        """Force to the disk what was written down: a checkpoint of these rounds is about to count."""
        ...


class Simulation(Generic[Handle]):
    """Runs a plan on an executor and tells a listener.

    Args:
        executor: runs clients and server; already started.
        plan: what to do.
        folder: the run folder, for trace/ and checkpoints/.
        listener: hears of every round.
        journal: is told of what went wrong without ending the run; also where the executor tells it.
        interrupts: says when to stop.
        done: the last round that is done already, where the executor has the states after it; None: none is.
    """

    def __init__(
        self,
        executor: Executor[Handle],
        plan: RunPlan,
        folder: Path,
        listener: Listener,
        journal: Journal | None = None,
        interrupts: Interrupts | None = None,
        done: int | None = None,
    ):
        self.executor, self.plan, self.folder, self.listener = executor, plan, folder, listener
        self.journal, self.interrupts = journal or Journal(), interrupts or Interrupts()
        self.done = done
        self._saved, self._saved_at = done, time.monotonic()
        self._score: float | None = None
        executor.clients_done = listener.clients_done
        self._recovery = Recovery(executor, plan, folder, self.journal, listener.phase, done)
        self._ahead = False  # whether the executor's state is that of a round that is not written down yet

    def run(self) -> None:
        """All rounds that are left; round 0 is the opening, where the method has one. Then newcomers join, where there
        are any.

        Raises:
            Stopped: a signal has asked for it; the state after the last whole round is saved.
        """
        try:
            while (following := self.plan.following(self.done)) <= self.plan.rounds:
                self._on_what_is_left(partial(self._go_through, following))
            if self.plan.newcomers:
                self.listener.phase(self.plan.rounds, "newcomers")
                self.listener.newcomers(self._on_what_is_left(self._welcome))
        except (RunError, OSError) as error:
            self._save_what_is_done()
            if isinstance(error, RunError):
                raise
            raise RunError(f"a file of the run could not be written: {error}") from error
        except KeyboardInterrupt:
            if self.interrupts.requested is None or self.interrupts.count > 1:
                raise
            self._save_what_is_done()
            raise Stopped(self.interrupts.requested) from None

    def _go_through(self, round_number: int) -> None:
        with self.interrupts.abandonable():
            self.executor.refresh()
        self._finish(
            self._round(round_number, self.plan.cohorts[round_number - 1]) if round_number else self._opening()
        )

    def _on_what_is_left(self, work: Callable[[], Result]) -> Result:
        """Do something; and do it again on what is left, where something it stood on is gone."""
        said = ""
        for _ in range(MOST):
            try:
                return work()
            except NodeLost as loss:
                said = str(loss)  # the error itself holds whatever the round had in hand
            self.journal.restarted(f"{said}; going on with what is left")
            if self._ahead:
                self.executor.go_back()
                self._ahead = False
            with self.interrupts.abandonable():
                self._recovery.bring_back()
            self.journal.take_faults()  # of rounds that are gone through once more
        raise RunError(f"{said} (the {MOST}th loss in one round)")

    def _save_what_is_done(self) -> None:
        """Save the state after the last whole round, unless it is saved; what had gone on goes back."""
        if self.done is None or self.done == self._saved:
            return
        try:
            if not self._recovery.complete:
                raise RunError("part of it was lost with a node")
            if self._ahead:
                self.executor.go_back()
            if (staged := self._stage(self.done, self._score)) is not None:
                self._publish(staged)
        except RunError as error:  # what was to be saved is where something is wrong
            self.journal.say(f"the state after round {self.done} is not saved: {error}")

    def _finish(self, record: RoundRecord) -> None:
        """Write a round down, save the state where it is due, and stop where that is asked for.

        The checkpoint is written first and takes its place last: one that is there has all its rounds in the records.
        """
        score = validation_score(record.evaluations, self.plan.reported)
        seconds, staged = dict(record.seconds), None
        if self._must_save(record.round):
            with self._phase(record.round, seconds, "checkpoint"):
                staged = self._stage(record.round, score)
        record = replace(record, seconds=seconds, faults={**record.faults, **self.journal.take_faults()})
        try:
            self.listener.round(record)
        except BaseException:
            if staged is not None:
                staged.discard()
            raise
        self.done, self._score, self._ahead = record.round, score, False
        self._recovery.note(record)
        self.executor.confirm()
        if staged is not None:
            self._publish(staged)
        if self.interrupts.requested is not None:
            raise KeyboardInterrupt

    def _must_save(self, round_number: int) -> bool:
        waited, limit = time.monotonic() - self._saved_at, self.plan.checkpoint_seconds
        return round_number > 0 and (self._is_due(round_number, self.plan.checkpoint_every) or 0 < limit <= waited)

    def _round(self, round_number: int, cohort: tuple[int, ...]) -> RoundRecord:
        seconds: dict[str, float] = {}
        phase = partial(self._phase, round_number, seconds)
        absent, slow = self.plan.absent(round_number), self.plan.slow(round_number)
        with self.interrupts.abandonable():
            with phase("downlink"):
                sent = self.executor.send(cohort)
            with phase("train", len(cohort) - len(absent)):
                trained = self.executor.train(round_number, sent.without(absent), self.plan.work(round_number))
        with phase("fuse"):
            seen = self._fuse(trained, self._is_due(round_number, self.plan.diagnostics_every))
        seconds |= {"fuse": seconds["fuse"] - seen.seconds, "diagnostics": seen.seconds}
        if round_number in self.plan.trace_rounds:
            with phase("trace"):
                self._trace(round_number, sent, trained)
        down_bytes, reports = sent.down_bytes, trained.reports
        del sent, trained  # the messages may go now
        with phase("evaluate"):
            rows = self._evaluate(round_number, cohort)
        faults: dict[int, Fault] = {**dict.fromkeys(slow, "straggler"), **dict.fromkeys(absent, "dropout")}
        diagnostics = (*seen.matrices, *self._confusion(rows))
        return RoundRecord(round_number, cohort, reports, down_bytes, rows, seconds, faults, seen.drift, diagnostics)

    def _opening(self) -> RoundRecord:
        seconds: dict[str, float] = {}
        everyone = tuple(range(self.plan.clients))
        with self._phase(0, seconds, "initial round", len(everyone)):
            with self.interrupts.abandonable():
                replied = self.executor.open(everyone)
            self._fuse(replied)
        if 0 in self.plan.trace_rounds:
            self._trace(0, Sent({}, {}), replied)
        return RoundRecord(0, everyone, replied.reports, {}, (), seconds)

    def _fuse(self, trained: Trained[Handle], matrices: bool = False) -> RoundDiagnostics:
        seen = self.executor.fuse(trained, matrices)
        self._ahead = True
        return seen

    def _welcome(self) -> NewcomerRecord:
        plan = self.plan
        with self.interrupts.abandonable():
            sent = self.executor.join(plan.newcomers)
            request = EvalRequest("personal", "received", plan.newcomers, plan.splits, plan.rounds, joining=True)
            received = self.executor.evaluate(request, sent)
            self._ahead = True  # their new states are no part of the last round's checkpoint
            self.executor.finetune(plan.rounds + 1, sent, plan.finetune_epochs)
            down_bytes = sent.down_bytes
            del sent  # the messages may go now
            trained = self.executor.evaluate(replace(request, phase="trained"))
        return NewcomerRecord(plan.rounds, down_bytes, tuple(received), tuple(trained))

    def _is_due(self, round_number: int, every: int) -> bool:
        return round_number == self.plan.rounds or (every > 0 and round_number % every == 0)

    def _evaluate(self, round_number: int, cohort: tuple[int, ...]) -> tuple[EvalRow, ...]:
        plan = self.plan
        if not self._is_due(round_number, plan.eval_every):
            return ()
        who = tuple(range(plan.clients)) if plan.eval_all else cohort
        requests = [
            EvalRequest("personal", plan.reported_phase, who, plan.splits, round_number),
            EvalRequest("global", "received", who, plan.splits, round_number),
        ]
        if plan.received:
            other = "trained" if plan.reported_phase == "received" else "received"
            requests.insert(1, EvalRequest("personal", other, who, plan.splits, round_number))
        if plan.classes and self._is_due(round_number, plan.diagnostics_every):
            requests = [replace(j, confusion=(j.model, j.phase) == plan.reported) for j in requests]
        rows: list[EvalRow] = []
        for request in requests:
            self.listener.phase(round_number, "evaluate", len(who))
            rows += self.executor.evaluate(request)
        return tuple(rows)

    def _confusion(self, rows: Sequence[EvalRow]) -> list[Matrix]:
        reported = [row for row in rows if row.split == "test" and (row.model, row.phase) == self.plan.reported]
        found = mean_confusion(reported, self.plan.classes)
        return [] if found is None else [found]

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

    def _stage(self, round_number: int, score: float | None) -> Staged | None:
        """Write the state after a round aside; where that fails it is told, and older checkpoints are as they were."""
        self._saved_at = time.monotonic()
        try:
            return stage_checkpoint(
                self.folder / "checkpoints",
                round_number,
                self.executor.server_state(),
                self.executor.client_states(),
                {"method": self.plan.method, **(self.plan.header or {})},
                score,
            )
        except OSError as error:
            self._not_saved(round_number, error)
            return None

    def _publish(self, staged: Staged) -> None:
        try:
            self.listener.sync()
            staged.publish(self.plan.checkpoint_keep)
        except OSError as error:
            self._not_saved(staged.round, error)
        else:
            self._saved = staged.round

    def _not_saved(self, round_number: int, error: OSError) -> None:
        self.journal.say(f"no checkpoint after round {round_number}: {error}; the run goes on, older ones are kept")

    @contextmanager
    def _phase(self, round_number: int, seconds: dict[str, float], name: str, due: int = 0) -> Iterator[None]:
        """Tell of a phase and take its time."""
        self.listener.phase(round_number, name, due)
        start = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start
