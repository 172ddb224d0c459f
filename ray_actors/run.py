"""Runs from beginning to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

import psutil

from pflsim.config.checks import check
from pflsim.config.settings import Settings
from pflsim.data.record import write_partition
from pflsim.engine.execution import Executor, NodeLost
from pflsim.engine.interrupts import Interrupts, Stopped
from pflsim.engine.recovery import MOST
from pflsim.engine.simulation import Simulation
from pflsim.errors import RunError
from pflsim.run_folder.environment import write_environment
from pflsim.run_folder.folder import create_run_folder, run_lock, write_config
from pflsim.run_folder.journal import Journal
from pflsim.run_folder.remote_copy.begin import new_place, resume_at_url
from pflsim.run_folder.remote_copy.remote_copy import RemoteCopy
from pflsim.run_folder.resume import fixed_settings
from pflsim.run_folder.summary import Summary
from pflsim.run_folder.tracking.hyperparameters import hyperparameters
from pflsim.run_folder.tracking.tracker import Tracker
from pflsim.terminal.console import Console, Progress
from pflsim.types import NewcomerRecord, RoundRecord
from ray_actors.components import describe
from ray_actors.hosts.inline import InlineExecutor
from ray_actors.placement.cpu_fallback import fallen_back, gpus_here
from ray_actors.prepare import PreparedRun, prepare
from ray_actors.session import Session, remove_empty_records, resume_point

if TYPE_CHECKING:
    from ray_actors.cluster.joined import JoinedRay
    from ray_actors.cluster.local import LocalRay
    from ray_actors.executor.dry_run import DryRuns


class Runner:
    """Runs one run after another from beginning to end; Ray and its actors stay up in between. Use it as a context."""

    def __init__(self) -> None:
        self.interrupts = Interrupts()
        self._open = ExitStack()
        self._ray: LocalRay | JoinedRay | None = None
        self._dry_runs: DryRuns | None = None

    def run(self, settings: Settings) -> Path:
        """Run the settings and leave a run folder, which it returns.

        Raises:
            SettingsError: something in the settings cannot be run; no actor was started.
            RunError: the run has ended before its end; see `Stopped` for being told to.
        """
        self.interrupts.begin()
        with self._stoppable(), self.interrupts.abandonable():
            check(settings)
            place = new_place(settings.run_dir)
            settings, said = fallen_back(settings, lambda: self._gpus(settings))
            job = prepare(settings)
            started = self._executor(job)
            run_dir = None if place else settings.run_dir
            folder = create_run_folder(job.meta.method, job.meta.data, settings.seed, run_dir)
        with run_lock(folder):
            with _written("this run"):
                _write_head(folder, job)
            journal = Journal(folder)
            if said:
                journal.say(said)
            remote_copy = None if place is None else RemoteCopy(place, folder, journal)
            self._go(Session(job, folder, journal, remote_copy=remote_copy), started)
        return folder

    def resume(self, folder: Path, settings: Settings) -> Summary:
        """Take up a run where its last checkpoint is, or begin it again where it has none.

        Args:
            folder: its run folder.
            settings: its settings, as `pflsim.run_folder.resume` reads them.

        Raises:
            SettingsError: the folder is in use, or what is in it is of another run; nothing was changed.
            RunError: see `run`.
        """
        with run_lock(folder), self._stoppable():
            with self.interrupts.abandonable():
                check(settings)
                job, journal = prepare(settings), Journal(folder)
                started = self._executor(job)
                reported: list[str] = []
                point = resume_point(job, folder, reported.append)
                remote_copy = resume_at_url(settings.run_dir, folder, journal, point.round if point else None)
                for line in reported:
                    journal.say(line)
                if point is None:
                    remove_empty_records(folder)
                session = Session(job, folder, journal, True, point, remote_copy)
                write_environment(folder, f"environment-{2 + len([*folder.glob('environment-*.json')])}.json")
                if not (folder / "partition.json").exists():
                    _write_partition(folder, job)
            return self._go(session, started)

    def _go(self, session: Session, started: Callable[[Journal], Executor]) -> Summary:
        job, folder, remote_copy = session.job, session.folder, session.remote_copy
        progress = cast(Progress, job.settings.progress)
        with closing(Console(job.meta, progress=progress, joined=_is_joined(job))) as console, ExitStack() as kept:
            console.start(folder, session.done if session.resumed else None, remote_copy.url if remote_copy else None)
            with _written("this run"):
                tracker = _tracker(session)
            if remote_copy:
                kept.enter_context(remote_copy)
            console.earlier(tracker.history)
            session.journal.counted = tracker.restarted
            try:
                return self._run_to_the_end(session, started, tracker, console)
            except BaseException:
                self._forget_actors()
                raise

    def _run_to_the_end(
        self, session: Session, started: Callable[[Journal], Executor], tracker: Tracker, console: Console
    ) -> Summary:
        """Whatever the end is, the summary is written and printed."""
        job, journal = session.job, session.journal
        try:
            with self._stoppable():
                with self.interrupts.abandonable():
                    executor = started(journal)
                    self.interrupts.install()  # Ray takes one of the signals when it starts
                    _brought_up(executor, journal)
                    if _is_joined(job):
                        journal.note(executor.whereabouts())
                    session.restore(executor)
                listener = _Listener(tracker, console, session.remote_copy)
                Simulation(executor, job.plan, session.folder, listener, journal, self.interrupts, session.done).run()
        except BaseException as error:
            journal.ended(f"the run ended: {error or type(error).__name__}")
            self._close(session, tracker, console, complete=False)
            raise
        return self._close(session, tracker, console, complete=True)

    def _close(self, session: Session, tracker: Tracker, console: Console, complete: bool) -> Summary:
        tracker.restarts = session.journal.restarts
        with _written("this run"):
            summary = tracker.close(complete)
        console.end(summary, session.folder, tracker.rates)
        return summary

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """A first signal inside the block is `Stopped`, and an error of Ray's a `RunError`."""
        try:
            yield
        except KeyboardInterrupt:
            if self.interrupts.lost is not None:
                raise RunError(self.interrupts.lost) from None
            if self.interrupts.requested is None or self.interrupts.count > 1:
                raise
            raise Stopped(self.interrupts.requested) from None
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "ray":
                raise
            first = str(error).strip().partition("\n")[0]
            raise RunError(f"Ray failed: {type(error).__name__}: {first}") from error

    def _forget_actors(self) -> None:
        """Whatever they are at work on is not wanted any more."""
        if self._ray is not None:
            with self.interrupts.signals_blocked():
                self._ray.close()

    def _executor(self, job: PreparedRun) -> Callable[[Journal], Executor]:
        """What brings the executor up that the settings ask for.

        Raises:
            SettingsError: the placement cannot be met; nothing was started.
        """
        parts, on_error = (job.factory, job.dataset, job.partition, job.rule, job.federation), job.on_error
        if job.settings.executor == "inline":
            return lambda journal: InlineExecutor(*parts, on_error, journal)
        from ray_actors.deployment import place
        from ray_actors.executor.dry_run import DryRuns
        from ray_actors.executor.ray_executor import RayExecutor

        self._dry_runs = self._dry_runs or DryRuns()
        found, store = self._found(job.settings), job.settings.placement.object_store_mb or store_mb(job)
        at = place(job, found, self._dry_runs, store)
        if at.elastic is not None:  # others may be faster: better to know before there is a run folder
            found.pool(at.placement, at.layout, store).hosts(at.layout.specs)

        def started(journal: Journal) -> Executor:
            for line in at.notes:
                journal.note(line)
            pool = found.pool(at.placement, at.layout, store)
            return RayExecutor(*parts, at.layout, pool, on_error, journal, at.elastic)

        return started

    def _found(self, settings: Settings) -> LocalRay | JoinedRay:
        """Ray, of our own or joined."""
        from ray_actors.cluster.joined import JoinedRay
        from ray_actors.cluster.local import LocalRay

        if self._ray is None:
            address = settings.ray_address
            made = JoinedRay(address) if address else LocalRay(self.interrupts.give_up)
            self.interrupts.install()  # Ray takes one of the signals when a cluster is joined
            self._ray = self._open.enter_context(made)
        return self._ray

    def _gpus(self, settings: Settings) -> float:
        """How many GPUs there are for a run."""
        if settings.executor == "inline":
            return settings.placement.gpus if gpus_here() else 0
        from ray_actors.deployment import gpus_there

        return gpus_there(self._found(settings), settings)

    def __enter__(self) -> Runner:
        self.interrupts.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.interrupts.signals_blocked():  # whoever is impatient now would leave processes behind
            self._open.close()
        self.interrupts.release()


def _brought_up(executor: Executor, journal: Journal) -> None:
    """Start it, on what is left where nodes leave meanwhile."""
    try:
        executor.start()
        return
    except NodeLost as loss:
        said = str(loss)
    for _ in range(MOST):
        journal.restarted(f"{said}; the run begins on what is left")
        try:
            executor.recover()
            return
        except NodeLost as loss:
            said = str(loss)
    raise RunError(f"{said} (the {MOST}th loss before the run could begin)")


def _is_joined(job: PreparedRun) -> bool:
    """Whether the run is on a cluster that was there before."""
    return job.settings.ray_address is not None and job.settings.executor == "ray"


def store_mb(job: PreparedRun) -> int:
    """MiB of shared memory for the data set, all states and the most messages at once, with as much again to spare.

    The messages are a round's both ways, or what all clients are judged by, where models are judged as received, or
    what newcomers are sent. At most a third of the free memory: beyond that Ray spills to disk,
    which is slow but works.
    """
    plan, rule = job.plan, job.rule
    model = sum(t.numel() * t.element_size() for t in job.federation.initial.values())
    cohort = max(len(cohort) for cohort in plan.cohorts)
    down, to_newcomers = (min(rule.models_sent(joining), plan.clients) for joining in (False, True))
    received = plan.received or plan.reported_phase == "received"
    reported = (plan.clients if plan.eval_all else cohort) if received else 0
    most = max(cohort * (down + 1), reported * down, len(plan.newcomers) * to_newcomers)
    private = sum(t.numel() * t.element_size() for t in job.initial.values())
    states = job.settings.clients * private + plan.clients * model  # of every client; the server may keep all models
    needed = 2 * (job.dataset.x.nbytes + most * model + states) / 2**20
    return int(max(128, min(needed, psutil.virtual_memory().available / 3 / 2**20)))


class _Listener:
    """Passes a round on to whoever writes it down, to whoever prints it, and to whoever keeps it elsewhere too."""

    def __init__(self, tracker: Tracker, console: Console, remote_copy: RemoteCopy | None = None):
        self.tracker, self.console, self.remote_copy = tracker, console, remote_copy

    def round(self, record: RoundRecord) -> None:
        with _written(f"round {record.round}"):
            metrics = self.tracker.round(record)
        self.console.round(metrics, self.tracker.memory.last_mb)

    def phase(self, round_number: int, name: str, due: int = 0) -> None:
        self.console.phase(round_number, name, due)
        if self.remote_copy:
            self.remote_copy.tick()

    def clients_done(self, clients: int) -> None:
        self.console.clients_done(clients)

    def sync(self) -> None:
        self.tracker.sync()
        if self.remote_copy:
            self.remote_copy.expect()

    def newcomers(self, record: NewcomerRecord) -> None:
        with _written("the newcomers"):
            self.tracker.newcomers(record)


def _tracker(session: Session) -> Tracker:
    settings = session.job.settings
    return Tracker(
        session.folder,
        session.job.meta,
        resume_after=session.resume_after,
        hyperparameters=hyperparameters(fixed_settings(settings), settings.names),
        per_client=settings.tracking.per_client,
    )


@contextmanager
def _written(what: str) -> Iterator[None]:
    """A disk that refuses what is written inside the block ends the run in words."""
    try:
        yield
    except OSError as error:
        raise RunError(f"the records of {what} could not be written: {error.strerror or error}") from error


def _write_head(folder: Path, job: PreparedRun) -> None:
    """What is known before the first round."""
    write_config(folder, asdict(job.settings))
    write_environment(folder)
    _write_partition(folder, job)


def _write_partition(folder: Path, job: PreparedRun) -> None:
    names = {f"{group}_name": describe(job.settings, group) for group in ("partition", "split")}
    write_partition(folder, job.dataset, job.partition, **names)
