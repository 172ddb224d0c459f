"""Whole runs as Ray tasks on a cluster, for `pflsim tune`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import ray
from ray.exceptions import RayError

from pflsim.commands.sweep import RUN_BYTES
from pflsim.commands.tune.processes import check_crashed, finish
from pflsim.config.settings import Settings
from pflsim.engine.interrupts import Interrupts, Stopped
from ray_actors.cluster.joined import join

POLL_S = 0.5
"""How often a signal is looked for."""


def run_on_cluster(runs: Sequence[Settings]) -> Iterator[tuple[int, str]]:
    """Run or resume each run in a task, on folders that all nodes share; see `run_side_by_side`."""
    if not ray.is_initialized():
        join(str(runs[0].ray_address))
    interrupts, waiting, running = Interrupts(), list(range(len(runs))), dict[ray.ObjectRef, int]()
    limit = len(runs) if runs[0].sweep.parallel == "auto" else runs[0].sweep.parallel
    crashed, cancelled = list[str](), False
    interrupts.install()
    try:
        while running or (waiting and not interrupts.requested):
            while waiting and len(running) < limit and not interrupts.requested:
                number = waiting.pop(0)
                running[_submit(runs[number])] = number
            ended, _ = ray.wait(list(running), timeout=POLL_S)
            if interrupts.requested and not cancelled:
                cancelled = True
                for ref in running:
                    ray.cancel(ref)  # the run gets a SIGINT, and saves its state
            for ref in ended:
                number = running.pop(ref)
                try:
                    result = ray.get(ref)
                except RayError as error:
                    crashed.append(f"{runs[number].run_dir}: {str(error).strip().splitlines()[-1]}")
                else:
                    yield number, result
        if interrupts.requested:
            raise Stopped(interrupts.requested)
        check_crashed(crashed)
    finally:
        for ref in running:
            ray.cancel(ref, force=True)
        interrupts.release()


def _submit(settings: Settings) -> ray.ObjectRef:
    placement = settings.placement
    shared = 1 if placement.actors_per_gpu == "auto" else placement.actors_per_gpu
    task = ray.remote(_work).options(
        num_cpus=placement.threads, num_gpus=placement.gpus and 1 / shared, memory=RUN_BYTES, max_retries=0
    )
    settings = replace(settings, run_dir=str(Path(str(settings.run_dir)).absolute()), progress="none")
    return task.remote(settings, os.getcwd(), sys.path)


def _work(settings: Settings, folder: str, path: Sequence[str]) -> str:
    """Finish a run in the working directory of the driver, and with its import path."""
    sys.path.extend(entry for entry in path if entry not in sys.path)
    os.chdir(folder)
    return finish(settings)
