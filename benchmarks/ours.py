"""Ours: a run as launch.py makes it, with a clock around every round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.rounds import Round, check_steps, digest
from pflsim.config.checks import check
from pflsim.config.settings import Settings
from pflsim.engine.execution import Executor
from pflsim.engine.simulation import Simulation
from pflsim.memory import held_mb
from pflsim.run_folder.accounting import client_traffic, total
from pflsim.run_folder.folder import create_run_folder
from pflsim.run_folder.journal import Journal
from pflsim.run_folder.tracking.tracker import Tracker
from pflsim.terminal.console import Console
from pflsim.types import NewcomerRecord, RoundRecord
from ray_actors.prepare import prepare
from ray_actors.run import Runner

Result = TypeVar("Result")


class ServerClock:
    """Adds up the seconds that the server takes to make messages and to fuse, wherever in the round it is asked to."""

    def __init__(self, executor: Executor[Any]):
        self.seconds = 0.0
        for name in ("send", "fuse"):
            setattr(executor, name, self._timed(getattr(executor, name)))

    def _timed(self, call: Callable[..., Result]) -> Callable[..., Result]:
        def timed(*given: Any, **named: Any) -> Result:
            start = time.perf_counter()
            result = call(*given, **named)
            self.seconds += time.perf_counter() - start
            return result

        return timed


class Stopwatch:
    """Passes rounds on to the tracker and notes what each took.

    Args:
        tracker: writes the round down, and has it printed.
        groups: the clients of every host.
        server: knows the server's part.
        growth: note the memory held after every round, outside of the time that is measured.
    """

    def __init__(self, tracker: Tracker, groups: Sequence[Sequence[int]], server: ServerClock, growth: bool):
        self.tracker, self.groups, self.server, self.growth = tracker, groups, server, growth
        self.rounds: list[Round] = []
        self.held: list[float] = []
        self.accuracy = 0.0
        self._last = time.perf_counter()

    def phase(self, round_number: int, name: str, due: int = 0) -> None:
        """Nothing is shown."""

    def clients_done(self, clients: int) -> None:
        """Nothing is shown."""

    def round(self, record: RoundRecord) -> None:
        """A round is over."""
        start = time.perf_counter()
        self.tracker.round(record)
        end = time.perf_counter()
        parts = dict(record.seconds)
        seconds = {name: parts.get(name, 0.0) for name in ("fuse", "evaluate")} | {"log": end - start}
        by_client = {report.client: report.seconds for report in record.reports}
        hosts = [sum(by_client.get(client, 0.0) for client in group) for group in self.groups]
        seconds["train"] = max(hosts)  # of the host that takes longest
        seconds["transfer"] = parts.get("downlink", 0.0) + parts.get("train", 0.0) - seconds["train"]
        traffic = total(client_traffic(record).values())
        # A checkpoint is written after the last round only: it is no part of a round.
        whole = end - self._last - parts.get("checkpoint", 0.0)
        self.rounds.append(
            {
                **seconds,
                "other": whole - sum(seconds.values()),
                "waiting": max(hosts) - sum(hosts) / len(hosts),
                "server": self.server.seconds,
                "total": whole,
                "steps": sum(report.steps for report in record.reports),
                "examples": sum(report.num_examples for report in record.reports),
                "evaluated": sum(row.total for row in record.evaluations),
                **{"up_bytes": traffic.up_bytes, "down_bytes": traffic.down_bytes},
            }
        )
        judged = [row for row in record.evaluations if row.model == self.tracker.meta.reported_model]
        self.accuracy = sum(row.correct for row in judged) / max(sum(row.total for row in judged), 1)
        if self.growth:
            self.held.append(held_mb())
        self.server.seconds = 0.0
        self._last = time.perf_counter()

    def newcomers(self, record: NewcomerRecord) -> None:
        """There are none."""

    def sync(self) -> None:
        """There are no checkpoints to be sure of."""


def measure(settings: Settings, root: Path, growth: bool = False) -> dict[str, Any]:
    """Run the settings.

    Args:
        settings: of the run, executor and placement among them.
        root: where the run folder goes.
        growth: note the memory held after every round.
    """
    start = time.perf_counter()
    check(settings)
    job = prepare(settings)
    prepared = time.perf_counter()
    folder = create_run_folder(job.meta.method, job.meta.data, settings.seed, root=root)
    with Runner() as runner, Tracker(folder, job.meta, Console(job.meta).round) as tracker:
        executor: Executor[Any] = runner._executor(job)(Journal())
        executor.start()
        started = time.perf_counter()
        layout = getattr(executor, "layout", None)
        groups = layout.groups if layout is not None else [range(settings.clients)]
        watch = Stopwatch(tracker, groups, ServerClock(executor), growth)
        Simulation(executor, job.plan, folder, watch).run()
    if settings.fraction == 1:
        check_steps(job, watch.rounds)
    return digest(
        job,
        watch.rounds,
        accuracy=watch.accuracy,
        cores=len(groups),
        lockstep=bool(job.factory.stacks),
        prepare=prepared - start,
        start=started - prepared,
        **({"held_mb": watch.held} if growth else {}),
    )
