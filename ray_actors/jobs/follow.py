"""Follow a job: print its log while it is written, and return its exit status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TextIO

from pflsim.errors import RunError
from ray_actors.jobs.client import FINISHED, Cluster

MAX_ATTEMPTS = 6
"""How many connections in a row may be lost without new output, with waits of 1, 2, 4, ... seconds between them."""
PENDING_S = 5
"""Seconds after which a job that has not started is reported."""
STOPPED = 143
"""The exit status of a stopped job: that of launch.py after SIGTERM, which Ray sends."""


@dataclass
class Follower:
    """Prints the log of a job, every character once, even if the connection is lost."""

    cluster: Cluster
    job: str
    out: TextIO
    wait: Callable[[float], None] = time.sleep
    seen: int = 0

    def follow(self) -> int:
        """Print the log until the job is finished.

        Returns:
            The exit status of the job; 130 after Ctrl-C, which does not stop the job.

        Raises:
            RunError: the connection is lost and cannot be restored. The job continues.
        """
        try:
            self._wait_for_start()
            return self._print_until_finished()
        except KeyboardInterrupt:
            print(f"\nthe job continues; stop it with   {self.cluster.command(f'stop {self.job}')}", file=self.out)
            return 130

    def _wait_for_start(self) -> None:
        """Report a job that does not start soon."""
        for _ in range(PENDING_S):
            if state(self.cluster.info(self.job)) != "PENDING":
                return
            self.wait(1)
        print(f"{self.job} waits for free resources; Ctrl-C ends this command, not the job", file=self.out, flush=True)

    def _print_until_finished(self) -> int:
        failures = 0
        while True:
            before = self.seen
            try:
                asyncio.run(self._print())
                info = self.cluster.info(self.job)
                if state(info) in FINISHED:
                    self._write(self.cluster.log(self.job), 0)  # the end of the log may be missing in the stream
                    return self._exit_status(info)
                failures = 0
                self.wait(1)
            except RunError as error:
                failures = failures + 1 if self.seen == before else 1
                if failures == MAX_ATTEMPTS:
                    again = self.cluster.command(f"logs {self.job} --follow")
                    raise RunError(f"{error}; the job may still be running. Follow it again with   {again}") from error
                self.wait(2 ** (failures - 1))

    async def _print(self) -> None:
        """Print what is new. Every connection receives the log from its beginning."""
        passed = 0
        async with aclosing(self.cluster.tail(self.job)) as texts:  # type: ignore[type-var]
            async for text in texts:
                self._write(text, passed)
                passed += len(text)

    def _write(self, text: str, at: int) -> None:
        """Print the new part of a piece of the log that begins at character `at`."""
        if at + len(text) > self.seen:
            self.out.write(text[max(0, self.seen - at) :])
            self.out.flush()
            self.seen = at + len(text)

    def _exit_status(self, info: Any) -> int:
        status = exit_status(info)
        if status and info.driver_exit_code is None and info.message and state(info) == "FAILED":
            print(f"{self.job} failed: {info.message.strip()}", file=self.out, flush=True)
        return status


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
