"""A run from beginning to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

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
from pflsim.types import RoundRecord
from ray_actors.inline import InlineExecutor
from ray_actors.prepare import Job, describe, prepare


def run(settings: Settings) -> Summary:
    """Run the settings and leave a run folder; returns what summary.json says.

    Raises:
        SettingsError: something in the settings cannot be run; no actor was started.
    """
    check(settings)
    job = prepare(settings)
    with executor_of(job) as executor:
        folder = create_run_folder(job.meta.method, job.meta.data, settings.seed, settings.run_dir)
        _write_head(folder, job)
        console = Console(job.meta)
        console.start(folder)
        tracker = Tracker(folder, job.meta)
        try:
            with tracker:
                executor.start()
                Simulation(executor, job.plan, folder, _Listener(tracker, console)).run()
        finally:
            console.end(tracker.close(complete=False), folder)
    return tracker.close(complete=True)


@contextmanager
def executor_of(job: Job) -> Iterator[Executor]:
    """The executor that the settings ask for, not yet started; its actors end with the block."""
    if job.settings.executor == "inline":
        yield InlineExecutor(job.recipe, job.dataset, job.partition, job.rule, job.federation)
        return
    from ray_actors.cluster import local_ray
    from ray_actors.placement import lay_out
    from ray_actors.pool import Pool
    from ray_actors.remote import RayExecutor

    with local_ray(job.settings.placement) as supply:
        layout = lay_out(job.work, job.settings.placement, supply)
        pool = Pool()
        try:
            yield RayExecutor(job.recipe, job.dataset, job.partition, job.rule, job.federation, layout, pool)
        finally:
            pool.close()


class _Listener:
    """Passes a round on to whoever writes it down and to whoever prints it."""

    def __init__(self, tracker: Tracker, console: Console):
        self.tracker, self.console = tracker, console

    def round(self, record: RoundRecord) -> None:
        self.console.round(self.tracker.round(record))


def _write_head(folder: Path, job: Job) -> None:
    """What is known before the first round."""
    write_config(folder, asdict(job.settings))
    write_environment(folder)
    names = {f"{group}_name": describe(job.settings, group) for group in ("partition", "split")}
    write_partition(folder, job.dataset, job.partition, **names)
