"""What is told of jobs: a table of all of ours, one in detail; and how one is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

from pflsim.errors import RunError
from ray_actors.jobs.client import KIND, RUN, Cluster
from ray_actors.jobs.follow import OVER, state, wait_until_over

LINES = 10
"""Of a log's end."""
SAVED = "stopped by SIG"
"""What launch.py says when it was told to stop and has saved what there was."""
STOP_S = 900.0
"""How long a driver may take to save and end, before we do not wait any longer."""
PENDING_S = 10.0
COLUMNS = ("id", "state", "started", "duration", "run")


def table(jobs: Sequence[Any], now: float | None = None) -> str:
    """Our jobs, the newest last."""
    ours = sorted((j for j in jobs if (j.metadata or {}).get(KIND) == RUN), key=lambda j: j.start_time or 0)
    rows = [COLUMNS, *(tuple(_row(job, now or time.time())) for job in ours)]
    if len(rows) == 1:
        return "no jobs of pflsim"
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(job: Any, now: float) -> Iterator[str]:
    yield job.submission_id
    yield state(job)
    yield _date(job.start_time)
    yield _duration(job, now)
    yield _what(job)


def details(cluster: Cluster, job: str) -> str:
    """One job, with the end of its log."""
    info = cluster.info(job)
    metadata = info.metadata or {}
    code = "" if info.driver_exit_code is None else f" (exit status {info.driver_exit_code})"
    said = {
        "job": info.submission_id or job,
        "state": f"{state(info)}{code}",
        "run": _what(info),
        "arguments": metadata.get("arguments"),
        "started": _date(info.start_time),
        "duration": _duration(info, time.time()),
        "node": _node(info),
        "home": metadata.get("home"),
        "message": (info.message or "").strip().partition("\n")[0],
    }
    lines = [f"{key + ':':<11}{value}" for key, value in said.items() if value]
    end = cluster.log(job).splitlines()[-LINES:]
    return "\n".join([*lines, *(["", "the end of its log:", *end] if end else [])])


def stop(cluster: Cluster, job: str, say: Callable[[str], None], wait: Callable[[float], None] = time.sleep) -> None:
    """Stop a job and wait until it is; its driver saves its state before it ends.

    Raises:
        RunError: it has not ended in time.
    """
    info = cluster.info(job)
    if state(info) in OVER:
        say(f"{job} is over: {state(info)}")
        return
    begun = state(info) == "RUNNING"
    cluster.stop(job)
    if begun:
        say(f"{job} saves its state and ends; this may take a while")
    info = wait_until_over(cluster, job, STOP_S if begun else PENDING_S, wait)
    if state(info) == "PENDING":
        say(f"{job} still waits for a place; it is told to stop, and ends as soon as it gets one")
    elif state(info) not in OVER:
        raise RunError(f"{job} was told to stop, but is {state(info)} still; see {cluster.command(f'status {job}')}")
    elif state(info) != "STOPPED":
        say(f"{job} was over before it could be stopped: {state(info)}")
    elif not begun:
        say(f"{job} is stopped; it had not begun")
    elif SAVED in cluster.log(job):
        again = cluster.command(f"submit --home-of {job} resume=last")
        say(f"{job} is stopped, its state is saved. Go on with   {again}")
    else:
        say(f"{job} is stopped; its log does not say that its state was saved: {cluster.command(f'logs {job}')}")


def _what(job: Any) -> str:
    metadata = job.metadata or {}
    parts = [metadata.get("method", "resume"), metadata.get("data"), f"seed {metadata.get('seed')}"]
    return " ".join(part for part in parts[: 3 if "seed" in metadata else 1] if part) if KIND in metadata else ""


def _node(job: Any) -> str:
    address = (job.driver_agent_http_address or "").removeprefix("http://").rpartition(":")[0]
    return " ".join(part for part in (address, job.driver_node_id) if part)


def _date(milliseconds: int | None) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000):%Y-%m-%d %H:%M:%S}" if milliseconds else "-"


def _duration(job: Any, now: float) -> str:
    if not job.start_time:
        return "-"
    seconds = max(0, round((job.end_time / 1000 if job.end_time else now) - job.start_time / 1000))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return (
        f"{hours} h {minutes:02d} min"
        if hours
        else f"{minutes} min {seconds % 60:02d} s"
        if minutes
        else f"{seconds} s"
    )
