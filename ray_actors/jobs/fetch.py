"""Bringing the run folders of a job back, through the address of the cluster's jobs alone.

A second, small job runs where the first one's driver does, or did, and prints the folders as an archive to its log.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import os
import shlex
import shutil
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pflsim.errors import RunError, SettingsError
from pflsim.run_folder.folder import CONFIG
from ray_actors.jobs import sender
from ray_actors.jobs.client import FETCH, KIND, Cluster
from ray_actors.jobs.copies import ANOTHER, is_settled, mark, put
from ray_actors.jobs.follow import state, wait_until_over
from ray_actors.jobs.pack import mib
from ray_actors.jobs.submit import NODE, home_of, place

LIMIT = 256 * 2**20
"""Bytes of an archive. Its text is held in memory by the cluster's dashboard, and by this process."""
NAMES = 60_000
"""Characters of names that are there already; a command's argument may not be much longer."""
PATIENCE_S = 60.0
"""For the second job to begin: it asks for nothing but a machine that is there."""
SENDING_S = 1800.0
NOT_FOUND = 127
"""The exit status of a shell that has not found a command."""


@dataclass
class Fetched:
    """What became of the run folders of a job.

    Args:
        brought: those that are new here, or newer than before.
        complete: those that had come whole before, and were not sent again.
        kept: those that were left as they are, and why.
    """

    brought: list[Path] = field(default_factory=list)
    complete: list[Path] = field(default_factory=list)
    kept: dict[Path, str] = field(default_factory=dict)


def fetch(
    cluster: Cluster, job: str, into: Path, checkpoints: bool = True, wait: Callable[[float], None] = time.sleep
) -> Fetched:
    """Bring the run folders of a job into a folder, or bring what came there before up to date.

    Raises:
        SettingsError: there is nothing to bring.
        RunError: what came is not what was sent, or nothing came, or it cannot be written.
    """
    home, node = home_of(cluster, job)
    metadata = cluster.info(job).metadata
    have = [name for name in _names(into) if is_settled(into / name, checkpoints)]
    asked = {
        "home": home,
        "elsewhere": json.loads(metadata.get("run_dirs", "[]")),
        "checkpoints": checkpoints,
        "have": have if sum(map(len, have)) < NAMES else [],
        "limit": LIMIT,
    }
    python, text = metadata.get("python", "python"), Path(sender.__file__).read_text(encoding="utf-8")
    command = f"exec {place(python)} -c {shlex.quote(text)} {shlex.quote(json.dumps(asked))}"
    head, content = received(_printed(cluster, job, command, node, wait, python), job)
    if not head["all"]:
        raise SettingsError(
            f"{job}: there is no run folder in {head['home']} (yet): see {cluster.command(f'logs {job}')}"
        )
    _check_names([*head["all"], *head["runs"]])
    found = unpack(content, head["runs"], into, checkpoints)
    for name, first in head["all"].items():
        folder = into / name
        if name in head["runs"]:
            continue
        if mark(folder) is None:
            found.kept[folder] = "it was not brought by fetch"
        elif sender.first(folder) != first:
            found.kept[folder] = ANOTHER
        else:
            found.complete.append(folder)
    return found


def _printed(cluster: Cluster, job: str, command: str, node: str, wait: Callable[[float], None], python: str) -> str:
    """What the command prints on a node; its job is forgotten afterwards."""
    name = cluster.submit(
        entrypoint=command,
        submission_id=f"{job}-fetch-{uuid.uuid4().hex[:6]}",
        metadata={KIND: FETCH},
        entrypoint_label_selector={NODE: node},
    )
    try:
        info = wait_until_over(cluster, name, PATIENCE_S, wait)
        if state(info) == "PENDING":
            raise RunError(f"{job}: the machine that it ran on does not answer; it may have left the cluster")
        if state(info) == "RUNNING":
            info = wait_until_over(cluster, name, SENDING_S, wait)
        if info.driver_exit_code == NOT_FOUND:
            raise RunError(f"{job}: its run folders cannot be read there: there is no {python} to do it")
        if state(info) != "SUCCEEDED":
            why = (info.message or "no reason given").strip().splitlines()[-1]
            raise RunError(f"{job}: its run folders cannot be read there: {why}")
        return cluster.log(name)
    finally:
        with suppress(RunError, SettingsError):
            cluster.stop(name)
            cluster.delete(name)


def received(log: str, job: str) -> tuple[dict[str, Any], bytes]:
    """The archive in a log, and what is said of it.

    Raises:
        RunError: it is not there, not whole, or was too large to be sent.
    """
    lines = log.splitlines()
    for line in lines:
        if line.startswith(f"{sender.ERROR} {{"):
            said = json.loads(line.partition(" ")[2])
            raise RunError(
                f"{job}: its run folders are {mib(said['bytes'])} as an archive, at most {mib(LIMIT)} come through a "
                f"log: give --without-checkpoints, or copy {said['home']} from the driver's machine"
            )
    begin = [number for number, line in enumerate(lines) if line.startswith(f"{sender.BEGIN} {{")]
    ends = [number for number, line in enumerate(lines) if line == sender.END]
    if len(begin) != 1 or not ends or ends[-1] < begin[0]:
        raise RunError(f"{job}: the log that brings its run folders is not whole; try again")
    head = json.loads(lines[begin[0]].partition(" ")[2])
    try:
        content = b"".join(base64.b64decode(line, validate=True) for line in lines[begin[0] + 1 : ends[-1]])
    except binascii.Error as error:
        raise RunError(f"{job}: something else is between the lines of its run folders; try again") from error
    if len(content) != head["bytes"] or hashlib.sha256(content).hexdigest() != head["sha256"]:
        raise RunError(f"{job}: its run folders did not arrive as they were sent; try again")
    return head, content


def unpack(content: bytes, names: list[str], into: Path, checkpoints: bool = True) -> Fetched:
    """Unpack run folders aside, then put each into its place.

    Raises:
        RunError: the archive has what no run folder has, or the folder cannot be written to.
    """
    try:
        into.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".fetch-", dir=into))
    except OSError as error:
        raise RunError(f"{into} cannot be written to: {error.strerror}") from error
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            archive.extractall(aside, filter="data")
        found = Fetched()
        for name in names:
            if (aside / name).is_dir():
                if why := put(aside / name, into / name, checkpoints):
                    found.kept[into / name] = why
                else:
                    found.brought.append(into / name)
        return found
    except (tarfile.TarError, EOFError) as error:
        raise RunError(f"what came is no archive of run folders ({error}); nothing was written") from error
    except OSError as error:
        raise RunError(f"{into} cannot be written to: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_names(names: list[str]) -> None:
    for name in names:
        if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise RunError(f"{name!r} is no name of a run folder; nothing was written")


def _names(into: Path) -> list[str]:
    """The run folders that are there."""
    found = []
    for folder, below, files in os.walk(into):
        if CONFIG in files:
            below.clear()
            found.append(Path(folder).relative_to(into).as_posix())
    return sorted(found)
