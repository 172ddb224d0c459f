"""Runs from beginning to end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

from pflsim.checks import check
from pflsim.console import Console
from pflsim.data.record import write_partition
from pflsim.environment import write_environment
from pflsim.execution import Executor
from pflsim.settings import Settings
from pflsim.simulation import Simulation
from pflsim.summary import Summary
from pflsim.tracking.run_folder import create_run_folder, write_config
from pflsim.tracking.tracker import Tracker
from pflsim.types import NewcomerRecord, RoundRecord
from ray_actors.inline import InlineExecutor
from ray_actors.prepare import Job, describe, prepare

if TYPE_CHECKING:
    from ray_actors.cluster import LocalRay


class Runner:
    """Runs one run after another from beginning to end; Ray and its actors stay up in between. Use it as a context."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._ray: LocalRay | None = None

    def run(self, settings: Settings) -> Summary:
        """Run the settings and leave a run folder; returns what summary.json says.

        Raises:
            SettingsError: something in the settings cannot be run; no actor was started.
        """
        check(settings)
        job = prepare(settings)
        started = self._executor(job)
        folder = create_run_folder(job.meta.method, job.meta.data, settings.seed, settings.run_dir)
        _write_head(folder, job)
        console = Console(job.meta)
        console.start(folder)
        tracker = Tracker(folder, job.meta)
        try:
            with tracker:
                executor = started()
                executor.start()
                Simulation(executor, job.plan, folder, _Listener(tracker, console)).run()
        finally:
            console.end(tracker.close(complete=False), folder)
        return tracker.close(complete=True)

    def _executor(self, job: Job) -> Callable[[], Executor]:
        """What brings the executor up that the settings ask for.

        Raises:
            SettingsError: the placement cannot be met; nothing was started.
        """
        parts = job.recipe, job.dataset, job.partition, job.rule, job.federation
        if job.settings.executor == "inline":
            return lambda: InlineExecutor(*parts)
        from ray_actors.cluster import LocalRay
        from ray_actors.placement import lay_out
        from ray_actors.remote import RayExecutor

        local = self._ray = self._ray or self._open.enter_context(LocalRay())
        placement = job.settings.placement
        layout = lay_out(job.work, placement, local.supply(placement), job.recipe.stacks)
        store = placement.object_store_mb or store_mb(job)
        return lambda: RayExecutor(*parts, layout, local.pool(placement, layout, store))

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def store_mb(job: Job) -> int:
    """MiB of shared memory for the data set once and for the most messages at once, with as much again to spare.

    Those are a round's both ways, or what all clients are judged by, where models are judged as received, or what
    newcomers are sent. At most a third of the free memory: beyond that Ray spills to disk, which is slow but works.
    """
    plan, rule = job.plan, job.rule
    model = sum(t.numel() * t.element_size() for t in job.federation.initial.values())
    cohort = max(len(cohort) for cohort in plan.cohorts)
    down, to_newcomers = (min(rule.models_sent(joining), plan.clients) for joining in (False, True))
    received = plan.received or plan.judged_phase == "received"
    judged = (plan.clients if plan.eval_all else cohort) if received else 0
    most = max(cohort * (down + 1), judged * down, len(plan.newcomers) * to_newcomers)
    needed = 2 * (job.dataset.x.nbytes + most * model) / 2**20
    return int(max(128, min(needed, psutil.virtual_memory().available / 3 / 2**20)))


class _Listener:
    """Passes a round on to whoever writes it down and to whoever prints it."""

    def __init__(self, tracker: Tracker, console: Console):
        self.tracker, self.console = tracker, console

    def round(self, record: RoundRecord) -> None:
        self.console.round(self.tracker.round(record))

    def newcomers(self, record: NewcomerRecord) -> None:
        self.tracker.newcomers(record)


def _write_head(folder: Path, job: Job) -> None:
    """What is known before the first round."""
    write_config(folder, asdict(job.settings))
    write_environment(folder)
    names = {f"{group}_name": describe(job.settings, group) for group in ("partition", "split")}
    write_partition(folder, job.dataset, job.partition, **names)
