"""Bringing the run folders of a job back, through the address of the cluster's jobs alone.

A second, small job runs where the first one's driver does, or did, and prints the folders as an archive to its log.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import shlex
import shutil
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from pflsim.errors import RunError, SettingsError
from ray_actors.jobs import sender
from ray_actors.jobs.client import FETCH, KIND, Cluster
from ray_actors.jobs.copies import mark, may_be_renewed, renew
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


def fetch(
    cluster: Cluster, job: str, into: Path, checkpoints: bool = True, wait: Callable[[float], None] = time.sleep
) -> list[Path]:
    """Bring the run folders of a job into a folder; those that are new, or newer than what was brought before.

    Raises:
        SettingsError: there is nothing to bring, or all of it is there already and not as it was brought.
        RunError: what came is not what was sent, or nothing came.
    """
    home, node = home_of(cluster, job)
    metadata = cluster.info(job).metadata
    have = [name for name in _names(into) if not may_be_renewed(into / name, home)]
    asked = {
        "home": home,
        "elsewhere": json.loads(metadata.get("run_dirs", "[]")),
        "checkpoints": checkpoints,
        "have": have if sum(map(len, have)) < NAMES else [],
        "limit": LIMIT,
    }
    text = Path(sender.__file__).read_text(encoding="utf-8")
    command = f"exec {place(metadata.get('python', 'python'))} -c {shlex.quote(text)} {shlex.quote(json.dumps(asked))}"
    head, content = received(_printed(cluster, job, command, node, wait), job)
    if not head["all"]:
        raise SettingsError(
            f"{job}: there is no run folder in {head['home']} (yet): see {cluster.command(f'logs {job}')}"
        )
    kept = [into / name for name in head["all"] if _is_kept(into / name, home)]
    if len(kept) == len(head["all"]):
        named = ", ".join(map(str, kept))
        raise SettingsError(
            f"{named} is there already, and was changed here or did not come from this job: it is not written over; "
            "move it away, or give another FOLDER"
        )
    return unpack(content, head["runs"], into, home)


def _printed(cluster: Cluster, job: str, command: str, node: str, wait: Callable[[float], None]) -> str:
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


def unpack(content: bytes, names: list[str], into: Path, home: str) -> list[Path]:
    """Unpack run folders aside, then move those to their places that are free, or have what came from this home before.

    Raises:
        RunError: the archive has what no run folder has, or the folder cannot be written to.
    """
    for name in names:
        if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise RunError(f"{name!r} is no name of a run folder; nothing was written")
    try:
        into.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".fetch-", dir=into))
    except OSError as error:
        raise RunError(f"{into} cannot be written to: {error.strerror}") from error
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            archive.extractall(aside, filter="data")
        new = []
        for number, name in enumerate(names):
            if not (aside / name).is_dir() or _is_kept(into / name, home):
                continue
            mark(aside / name, home)
            if (into / name).exists():
                renew(into / name, aside / name, aside / f".old-{number}")
            else:
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                (aside / name).rename(into / name)
            new.append(into / name)
        return new
    except (tarfile.TarError, EOFError) as error:
        raise RunError(f"what came is no archive of run folders ({error}); nothing was written") from error
    except OSError as error:
        raise RunError(f"{into} cannot be written to: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_kept(folder: Path, home: str) -> bool:
    """Whether something is there that is not written over."""
    return folder.exists() and not may_be_renewed(folder, home)


def _names(into: Path) -> list[str]:
    """What is in the folder already."""
    return sorted(path.name for path in into.iterdir() if path.is_dir()) if into.is_dir() else []
