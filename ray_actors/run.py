"""A run from beginning to end: settings in, run folder out."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning_modules.hosts.devices import torch_threads, with_server_device
from lightning_modules.hosts.inline import InlineExecutor
from lightning_modules.loggers import logger_makers
from lightning_modules.nets.frozen import save_frozen
from lightning_modules.prepare import PreparedRun, prepare
from lightning_modules.torch_defaults import torch_defaults
from pflsim.analysis.runs import read_run
from pflsim.config.settings import Settings, swept
from pflsim.config.validate import is_url
from pflsim.data.record import record_names, write_partition
from pflsim.data.sets import cost
from pflsim.engine.callbacks import Callbacks
from pflsim.engine.execution import Executor, NodeLost, StatesLost
from pflsim.engine.interrupts import Interrupts, Stopped
from pflsim.engine.simulation import MAX_NODE_LOSSES, Simulation
from pflsim.errors import DivergenceError, RunError, SettingsError, in_one_line
from pflsim.records.checkpoint_read import Checkpoint, by_round
from pflsim.records.environment import check_code, write_environment
from pflsim.records.folder import LOG, create_run_folder, run_lock, run_log, run_status, write_config
from pflsim.records.history import validation_scores
from pflsim.records.predictions import from_bytes, write_predictions
from pflsim.records.remote import RemoteCopy, check_new_url, resumed_copy
from pflsim.records.saved_settings import fixed_settings, saved_settings
from pflsim.records.scalars import hyperparameters
from pflsim.records.summary import Summary
from pflsim.records.tracker import Tracker
from pflsim.terminal.console import Console, Progress, print_card
from pflsim.types import RoundRecord
from ray_actors.resume_point import has_records, remove_leftovers, resume_point

if TYPE_CHECKING:
    from ray_actors.cluster import JoinedRay, LocalRay

logger = logging.getLogger(__name__)


class Runner:
    """Context manager that runs one run after another; Ray and its actors keep running in between.

    Args:
        early: Ray that is starting already.
    """

    _ray: LocalRay | JoinedRay | None

    def __init__(self, early: LocalRay | None = None) -> None:
        self.interrupts, self._ray = Interrupts(), early

    def check(self, settings: Settings, kept: dict[str, Any]) -> None:
        """Prepare a run, and drop what this makes except the data set.

        Args:
            settings: of the run.
            kept: see `load_federation`.

        Raises:
            SettingsError: the settings cannot be run.
        """
        with torch_defaults(), self._stoppable(), self.interrupts.abandonable():
            print_card(prepare(with_server_device(settings), kept=kept).dataset.card, settings.progress)

    def run(self, settings: Settings, callbacks: Iterable[Any] = ()) -> Path:
        """Run the settings and return the run folder.

        Args:
            settings: of the run.
            callbacks: see `pflsim.run`.

        Raises:
            SettingsError: the settings cannot be run; no actor was started.
            RunError: the run ended early; `Stopped` if a signal asked for it.
        """
        with torch_defaults(), self._stoppable():
            with self.interrupts.abandonable():
                called = Callbacks(callbacks)
                if url := settings.run_dir if is_url(settings.run_dir) else None:
                    check_new_url(url)
                prepared = prepare(with_server_device(settings), new=True)
                settings = prepared.settings
                make_executor = self._executor(prepared)
                run_dir = None if url else settings.run_dir
                names = prepared.meta.method, prepared.meta.data
                folder = create_run_folder(*names, settings.seed, run_dir, swept=swept(settings))
            with run_lock(folder), run_log(folder), self._stoppable(folder):
                write_config(folder, asdict(settings))
                write_environment(folder, settings=settings)
                _write_partition(folder, prepared)
                save_frozen(folder, prepared.factory.nets())
                copy = RemoteCopy(url, folder) if url else None
                session = partial(self._run_session, prepared, folder, make_executor, copy, called)
                self._until_it_ends(session, folder, settings, called)
        return folder

    def resume(
        self, folder: Path, settings: Settings, callbacks: Iterable[Any] = (), changed_code: bool = False
    ) -> Summary:
        """Resume a run from its last checkpoint, or start it again if it has none.

        Args:
            folder: the run folder.
            settings: of the run, as `pflsim.records.saved_settings` reads them.
            callbacks: see `pflsim.run`.
            changed_code: whether the run goes on if the user's code has changed.

        Raises:
            SettingsError: the folder is in use, or contains another run, or the code has changed; nothing was changed.
            RunError: see `run`.
        """
        with torch_defaults(), run_log(folder), run_lock(folder), self._stoppable(folder):
            called = Callbacks(callbacks)
            session = partial(self._resume, folder, settings, called, changed_code)
            return self._until_it_ends(session, folder, settings, called)

    def _until_it_ends(
        self, session: Callable[[], Summary], folder: Path, settings: Settings, callbacks: Callbacks
    ) -> Summary:
        """Run a session, and resume from the newest checkpoint when states are lost with a node.

        Raises:
            RunError: see `run`.
        """
        losses, reached = 0, -1
        while True:
            try:
                return session()
            except StatesLost as lost:
                newest = max(by_round(folder / "checkpoints"), default=-1)
                losses, reached = 1 if newest > reached else losses + 1, newest
                if losses == MAX_NODE_LOSSES:
                    why = f"{lost}, {losses} times without a new checkpoint; resume={folder} continues"
                    raise RunError(why) from None
                logger.warning(f"{lost}; the rounds after the newest checkpoint are repeated, and recorded again")
            session = partial(self._resume, folder, settings, callbacks, True)

    def _resume(self, folder: Path, settings: Settings, callbacks: Callbacks, changed_code: bool) -> Summary:
        """Run the rounds after the newest checkpoint, see `resume`."""
        with self.interrupts.abandonable():
            notes: list[str] = []
            check_code(folder, settings, changed_code, notes.append)
            prepared = prepare(settings)
            make_executor = self._executor(prepared)
            checkpoint = resume_point(prepared, folder, notes.append)
            save_frozen(folder, prepared.factory.nets())
            done = None if checkpoint is None else checkpoint.round
            url = settings.run_dir
            remote_copy = resumed_copy(url, folder, done) if url and is_url(url) else None
            for note in notes:
                logger.warning(note)
            remove_leftovers(folder)
            name = f"environment-{2 + len([*folder.glob('environment-*.json')])}.json"
            write_environment(folder, name, settings)
            if not (folder / "partition.json").exists():
                _write_partition(folder, prepared)
            saved = saved_settings(folder)
            if (extended := replace(saved, rounds=settings.rounds, stop=settings.stop)) != saved:
                write_config(folder, asdict(extended))
        return self._run_session(prepared, folder, make_executor, remote_copy, callbacks, checkpoint)

    def _run_session(
        self,
        prepared: PreparedRun,
        folder: Path,
        make_executor: Callable[[], Executor],
        remote_copy: RemoteCopy | None,
        callbacks: Callbacks,
        checkpoint: Checkpoint | None = None,
    ) -> Summary:
        """Run all rounds, or those after a checkpoint; writes the summary in any case.

        Args:
            prepared: the run.
            folder: its run folder.
            make_executor: starts Ray and its actors.
            remote_copy: copies the run folder to a URL; None: there is no copy.
            callbacks: of the user.
            checkpoint: where the run resumes; None: at the beginning.
        """
        settings, done = prepared.settings, None if checkpoint is None else checkpoint.round
        joined = settings.ray_address is not None and settings.executor == "ray"
        console = Console(prepared.meta, progress=cast(Progress, settings.progress), joined=joined)
        # Runs that work side by side would wait for each other's threads in every operation of the driver.
        with torch_threads(settings.placement.threads), closing(console), ExitStack() as stack:
            write_step = stack.enter_context(run_status(folder))
            card = prepared.dataset.card if done is None else ""
            console.start(folder, done, remote_copy.url if remote_copy else None, card)
            if remote_copy:
                stack.enter_context(remote_copy)
            names = {**settings.names, "data": prepared.meta.data}
            tracker = Tracker(
                folder,
                prepared.meta,
                resume_after=(-1 if done is None else done) if has_records(folder) else None,
                hyperparameters=hyperparameters(fixed_settings(settings), names),
                per_client=settings.tracking.per_client,
                loggers=logger_makers(settings.tracking.loggers, folder),
            )
            for warning in prepared.warnings:
                tracker.warn(warning)
            if prepared.partition.sets:
                level, text = cost(prepared.partition)
                logger.log(level, text)
            console.earlier(tracker.history)
            try:
                with self._stoppable(folder):
                    with self.interrupts.abandonable():
                        if settings.executor == "ray":
                            console.waiting("starting Ray and its actors")
                        executor = make_executor()
                        executor.faults.on_restart, executor.group_starts = tracker.restarted, write_step
                        self.interrupts.install()  # Ray replaces one of the handlers when it starts
                        _start(executor, checkpoint)
                    listener = _Listener(tracker, console, remote_copy, write_step)
                    scores = validation_scores(tracker.history, prepared.meta.reported)
                    content = checkpoint.predictions() if checkpoint and prepared.plan.recorded_rows else b""
                    write_predictions(folder, content)
                    simulation = Simulation(
                        executor, prepared.plan, folder, listener, self.interrupts, done, scores, callbacks,
                        from_bytes(content),
                    )  # fmt: skip
                    simulation.run()
            except BaseException as error:
                logger.debug(f"the run ended: {error or type(error).__name__}")
                summary = tracker.close(complete=False)
                if not isinstance(error, StatesLost):  # after which the next session begins
                    console.end(summary, folder, resumable=not isinstance(error, DivergenceError))
                    self._close_ray()  # the current work of its actors is not needed any more
                raise
            summary = tracker.close(True, simulation.states_saved, simulation.stopped)
            console.end(summary, folder)
        if not summary.states_saved:
            raise RunError("results are complete, final states are not saved; resuming computes and saves them")
        callbacks.end(read_run(folder))
        return summary

    @contextmanager
    def _stoppable(self, folder: Path | None = None) -> Iterator[None]:
        """Raise `Stopped` after a first signal inside the block, and a `RunError` after an unexpected error.

        Args:
            folder: the run folder, whose run.log gets the traceback; None: there is none yet.
        """
        try:
            yield
        except KeyboardInterrupt:
            if self.interrupts.requested is None or self.interrupts.count > 1:
                raise
            raise Stopped(self.interrupts.requested) from None
        except (RunError, SettingsError):
            raise
        except OSError as error:
            raise RunError(f"reading or writing failed: {error}") from error
        except Exception as error:
            if folder is None:
                raise
            logger.debug("".join(traceback.format_exception(error)).rstrip())
            what = "Ray failed" if type(error).__module__.partition(".")[0] == "ray" else "an unexpected error"
            raise RunError(f"{what}: {in_one_line(error)}; the traceback is in {folder / LOG}") from error

    def _close_ray(self) -> None:
        with self.interrupts.signals_blocked():  # another signal would leave processes behind
            if self._ray is not None:
                self._ray.close()
            self._ray = None

    def _executor(self, prepared: PreparedRun) -> Callable[[], Executor]:
        """Return a function that makes the executor, after checking that the placement is possible.

        Raises:
            SettingsError: the placement is not possible; nothing was started.
        """
        if prepared.settings.executor == "inline":
            return lambda: InlineExecutor(prepared)
        import ray

        from ray_actors.cluster import JoinedRay, LocalRay, plan
        from ray_actors.executor import RayExecutor

        placement, address = prepared.settings.placement, prepared.settings.ray_address
        found = self._ray or (JoinedRay(address) if address or ray.is_initialized() else LocalRay())
        if self._ray is None:
            self._ray = found
            self.interrupts.install()  # Ray replaces one of the handlers when a cluster is joined
        layout = plan(prepared, found)
        if address:  # other jobs may have the resources: notice it before there is a run folder
            found.pool(placement, layout)
        return lambda: RayExecutor(prepared, layout, found.pool(placement, layout))

    def __enter__(self) -> Runner:
        self.interrupts.install()
        return self

    def __exit__(self, *error: object) -> None:
        self._close_ray()
        self.interrupts.release()


def _start(executor: Executor, checkpoint: Checkpoint | None) -> None:
    """Start the executor and load the checkpoint into it; if nodes are lost meanwhile, wait for others.

    Raises:
        SettingsError: the checkpoint is of another version of the method.
    """
    start: Callable[[], object] = executor.start
    for losses in range(1, MAX_NODE_LOSSES + 1):
        try:
            start()
            break
        except NodeLost as loss:
            if losses == MAX_NODE_LOSSES:
                raise RunError(f"{loss} (the {losses}th loss before the run could begin)") from None
            logger.warning(f"{loss}; the run begins when other nodes have room")
        executor.faults.count_restart()
        start = executor.recover
    if checkpoint is not None:
        try:
            executor.restore(checkpoint.server(), checkpoint.clients())
        except ValueError as error:
            raise SettingsError(f"{checkpoint.path} does not fit this run: {error}") from error


class _Listener:
    """Passes the events of a run to the tracker, the console, the remote copy and status.txt."""

    def __init__(self, tracker: Tracker, console: Console, copy: RemoteCopy | None, step: Callable[[str], object]):
        self.tracker, self.console, self.remote_copy, self.write_step = tracker, console, copy, step
        self.clients_done, self.sync, self.newcomers = console.clients_done, tracker.sync, tracker.newcomers

    def round(self, record: RoundRecord) -> None:
        metrics = self.tracker.round(record)
        self.console.round(metrics, self.tracker.memory.last_mb)

    def phase(self, round_number: int, name: str, due: int = 0) -> None:
        self.console.phase(round_number, name, due)
        self.write_step(f"round {round_number} ({name})")
        if self.remote_copy:
            self.remote_copy.upload_if_due()


def _write_partition(folder: Path, prepared: PreparedRun) -> None:
    names, task = record_names(prepared.settings), prepared.factory.training.task.record()
    write_partition(folder, prepared.dataset, prepared.partition, names, task)
