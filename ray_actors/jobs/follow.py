"""Following a job: its log as it comes, and the exit status that it ends with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TextIO

from pflsim.errors import RunError
from ray_actors.jobs.client import OVER, Cluster

ATTEMPTS = 6
"""How often in a row the connection may be lost with nothing new coming; waits of 1, 2, 4, ... seconds."""
SOON = 5
"""Seconds in which a job begins that has a place."""
STOPPED = 143
"""As launch.py itself ends when it is told to stop by SIGTERM, which is what Ray sends."""


@dataclass
class Follower:
    """Prints the log of a job, every character once, however often the connection is lost."""

    cluster: Cluster
    job: str
    out: TextIO
    wait: Callable[[float], None] = time.sleep
    seen: int = 0

    def follow(self) -> int:
        """Print until the job is over.

        Returns:
            The exit status: the job's own; 130 at Ctrl-C, which leaves the job alone.

        Raises:
            RunError: the connection is lost for good; the job goes on.
        """
        try:
            self._pending()
            return self._to_the_end()
        except KeyboardInterrupt:
            print(f"\nthe job goes on; stop it with   {self.cluster.command(f'stop {self.job}')}", file=self.out)
            return 130

    def _pending(self) -> None:
        """Say so if it does not begin soon."""
        for _ in range(SOON):
            if state(self.cluster.info(self.job)) != "PENDING":
                return
            self.wait(1)
        print(f"{self.job} waits for a place; Ctrl-C leaves it waiting", file=self.out, flush=True)

    def _to_the_end(self) -> int:
        failures = 0
        while True:
            before = self.seen
            try:
                asyncio.run(self._print())
                info = self.cluster.info(self.job)
                if state(info) in OVER:
                    self._write(self.cluster.log(self.job), 0)  # what came between the log's end and the job's
                    return self._ended(info)
                failures = 0
                self.wait(1)
            except RunError as error:
                failures = failures + 1 if self.seen == before else 1
                if failures == ATTEMPTS:
                    again = self.cluster.command(f"logs {self.job} --follow")
                    raise RunError(f"{error}; the job may go on. Follow it again with   {again}") from error
                self.wait(2 ** (failures - 1))

    async def _print(self) -> None:
        """Every connection gets the log from its beginning."""
        passed = 0
        async with aclosing(self.cluster.tail(self.job)) as texts:  # type: ignore[type-var]
            async for text in texts:
                self._write(text, passed)
                passed += len(text)

    def _write(self, text: str, at: int) -> None:
        """Print what is new of a piece of the log that begins at a character."""
        if at + len(text) > self.seen:
            self.out.write(text[max(0, self.seen - at) :])
            self.out.flush()
            self.seen = at + len(text)

    def _ended(self, info: Any) -> int:
        status = exit_status(info)
        if status and info.driver_exit_code is None and info.message and state(info) == "FAILED":
            print(f"{self.job} failed: {info.message.strip()}", file=self.out, flush=True)
        return status


def state(info: Any) -> str:
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    return str(getattr(info.status, "value", info.status))


def exit_status(info: Any) -> int:
    """What a shell would see had the job run in it."""
    code = info.driver_exit_code
    if state(info) == "SUCCEEDED":
        return 0
    if state(info) == "STOPPED":
        return STOPPED
    return 1 if not code else code if code > 0 else 128 - code


def wait_until_over(cluster: Cluster, job: str, seconds: float, wait: Callable[[float], None] = time.sleep) -> Any:
    """The details of a job when it is over, or when the time is."""
    until = time.monotonic() + seconds
    while True:
        info = cluster.info(job)
        if state(info) in OVER or time.monotonic() > until:
            return info
        wait(1)
