"""Runs pflsim as launch.py does, and measures every round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.rounds import Round, check_steps, digest
from lightning_modules.hosts.devices import with_server_device
from lightning_modules.prepare import prepare
from pflsim.config.checks import check
from pflsim.config.settings import Settings
from pflsim.engine.execution import Executor
from pflsim.engine.simulation import Simulation
from pflsim.records.folder import create_run_folder
from pflsim.records.history import Traffic, client_traffic
from pflsim.records.tracker import Tracker, held_mb
from pflsim.terminal.console import Console
from pflsim.types import NewcomerRecord, RoundRecord
from ray_actors.run import Runner

Result = TypeVar("Result")


class ServerClock:
    """Sums the seconds that the server takes for downlinks and fusion."""

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
    """Passes rounds to the tracker and measures each of them.

    Args:
        tracker: records the rounds.
        console: prints the rounds.
        groups: the clients of each host.
        server: measures the server.
        growth: record the memory after every round; this time is not measured.
    """

    def __init__(
        self,
        tracker: Tracker,
        console: Console,
        groups: Sequence[Sequence[int]],
        server: ServerClock,
        growth: bool,
    ):
        self.tracker, self.console, self.groups, self.server, self.growth = tracker, console, groups, server, growth
        self.rounds: list[Round] = []
        self.held: list[float] = []
        self.accuracy = 0.0
        self._last = time.perf_counter()

    def phase(self, round_number: int, name: str, due: int = 0) -> None:
        """Do nothing."""

    def clients_done(self, clients: int) -> None:
        """Do nothing."""

    def round(self, record: RoundRecord) -> None:
        """Record a round."""
        start = time.perf_counter()
        self.console.round(self.tracker.round(record))
        end = time.perf_counter()
        parts = dict(record.seconds)
        seconds = {name: parts.get(name, 0.0) for name in ("fuse", "evaluate")} | {"log": end - start}
        by_client = {report.client: report.seconds for report in record.reports}
        hosts = [sum(by_client.get(client, 0.0) for client in group) for group in self.groups]
        seconds["train"] = max(hosts)  # the slowest host
        seconds["transfer"] = parts.get("downlink", 0.0) + parts.get("train", 0.0) - seconds["train"]
        traffic = sum(client_traffic(record).values(), Traffic())
        # Only the last round writes a checkpoint, so exclude it.
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
        reported = [row for row in record.evaluations if row.model == self.tracker.meta.reported_model]
        self.accuracy = sum(row.correct or 0 for row in reported) / max(sum(row.total for row in reported), 1)
        if self.growth:
            self.held.append(held_mb())
        self.server.seconds = 0.0
        self._last = time.perf_counter()

    def newcomers(self, record: NewcomerRecord) -> None:
        """Do nothing; the runs have no newcomers."""

    def sync(self) -> None:
        """Do nothing; checkpoints need not be safe."""


def measure(settings: Settings, root: Path, growth: bool = False) -> dict[str, Any]:
    """Run the settings and return the figures.

    Args:
        settings: the settings of the run.
        root: the folder for the run folder.
        growth: record the memory after every round.
    """
    start = time.perf_counter()
    check(settings)
    prepared = prepare(with_server_device(settings))
    ready = time.perf_counter()
    folder = create_run_folder(prepared.meta.method, prepared.meta.data, settings.seed, root=root)
    with Runner() as runner, closing(Tracker(folder, prepared.meta)) as tracker:
        executor: Executor[Any] = runner._executor(prepared)()
        executor.start()
        started = time.perf_counter()
        layout = getattr(executor, "layout", None)
        groups = layout.groups if layout is not None else [range(settings.clients)]
        watch = Stopwatch(tracker, Console(prepared.meta), groups, ServerClock(executor), growth)
        Simulation(executor, prepared.plan, folder, watch).run()
    if settings.fraction == 1:
        check_steps(prepared, watch.rounds)
    return digest(
        prepared,
        watch.rounds,
        accuracy=watch.accuracy,
        cores=len(groups),
        lockstep=bool(prepared.factory.stacks),
        prepare=ready - start,
        start=started - ready,
        **({"held_mb": watch.held} if growth else {}),
    )
