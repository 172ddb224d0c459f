"""Follow a job: print its log while it is written, and return its exit status."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TextIO

from pflsim.errors import RunError
from ray_actors.jobs.client import FINISHED, Cluster

MAX_ATTEMPTS = 6
"""How many requests in a row may fail, with waits of 1, 2, 4, ... seconds between them."""
PENDING_POLLS = 5
"""Requests after which a job that has not started is reported; there is about one per second."""
STOPPED = 143
"""The exit status of a stopped job: that of a run after SIGTERM, which Ray sends."""


def follow(cluster: Cluster, job: str, out: TextIO, wait: Callable[[float], None] = time.sleep) -> int:
    """Print the log of a job until it is finished, every character once, even if the connection is lost.

    Returns:
        The exit status of the job; 130 after Ctrl-C, which does not stop the job.

    Raises:
        RunError: the connection is lost and cannot be restored. The job continues.
    """
    printed = failures = polls = 0
    try:
        while True:
            try:
                info = cluster.info(job)  # first, so that the log of a finished job is complete
                log = cluster.log(job)
            except RunError as error:
                failures += 1
                if failures == MAX_ATTEMPTS:
                    again = cluster.command(f"logs {job} --follow")
                    raise RunError(f"{error}; the job may still be running. Follow it again with   {again}") from error
                wait(2 ** (failures - 1))
                continue
            out.write(log[printed:])
            out.flush()
            printed, failures, polls = len(log), 0, polls + 1
            if state(info) in FINISHED:
                if state(info) == "FAILED" and info.driver_exit_code is None and info.message:
                    print(f"{job} failed: {info.message.strip()}", file=out, flush=True)
                return exit_status(info)
            if polls == PENDING_POLLS and state(info) == "PENDING":
                print(f"{job} waits for free resources; Ctrl-C ends this command, not the job", file=out, flush=True)
            wait(1 + len(log) / 2**20)  # each answer has the whole log, so a long one is requested less often
    except KeyboardInterrupt:
        print(f"\nthe job continues; stop it with   {cluster.command(f'stop {job}')}", file=out)
        return 130


def state(info: Any) -> str:
    """Return PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    return str(getattr(info.status, "value", info.status))


def exit_status(info: Any) -> int:
    """Return the exit status that a shell would see."""
    code = info.driver_exit_code
    if state(info) == "SUCCEEDED":
        return 0
    if state(info) == "STOPPED":
        return STOPPED
    return 1 if not code else code if code > 0 else 128 - code


def wait_until_finished(cluster: Cluster, job: str, seconds: float, wait: Callable[[float], None] = time.sleep) -> Any:
    """Return the `JobDetails` of a job when it is finished or the time has passed."""
    until = time.monotonic() + seconds
    while True:
        info = cluster.info(job)
        if state(info) in FINISHED or time.monotonic() > until:
            return info
        wait(1)
