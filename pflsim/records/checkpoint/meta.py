"""A checkpoint's folder, and its meta.json: the metadata of the checkpoint, with a checksum of each of its files."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pflsim.records import environment

FORMAT = 2
META = "meta.json"
NAME = re.compile(r"server\.pt|(?:adapted|client)_(\d{3}|[1-9]\d{3,})\.pt")
FOLDER = re.compile(r"round_(\d{4}|[1-9]\d{4,})")


class BadCheckpoint(ValueError):
    """Raised when a checkpoint cannot be used. `damaged` says whether its files differ from what was written."""

    def __init__(self, reason: str, damaged: bool = True):
        super().__init__(reason)
        self.damaged = damaged


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint. Its methods verify the checksum of each file that they load, and raise BadCheckpoint.

    Args:
        path: its folder.
        round: the round just finished.
        header: the settings of the run, e.g. method, model, seed.
        score: mean validation accuracy of the reported model after the round; None if unknown.
        files: the size in bytes and the SHA-256 of every file by name.
        versions: of pflsim and torch (None if a package is not installed), and the processor.
    """

    path: Path
    round: int
    header: Mapping[str, Any]
    score: float | None
    files: Mapping[str, tuple[int, str]]
    versions: Mapping[str, str | None]

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the ids of its clients, ascending."""
        return tuple(sorted(int(name[7:-3]) for name in self.files if name.startswith("client_")))

    def server(self) -> Any:
        """Return the server rule's state in plain form; `restored` rebuilds it."""
        return self.load("server.pt")

    def clients(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each client's id and private state by ascending id. Loads one client at a time."""
        return ((client, self.client(client)) for client in self.ids)

    def client(self, client: int) -> dict[str, Any]:
        """Return the private state of a client."""
        return self.load(f"client_{client:03d}.pt")

    def adapted(self, client: int) -> dict[str, Any] | None:
        """Return the tensors of a client's adapted model that differ from its private state; None: not stored."""
        name = f"adapted_{client:03d}.pt"
        return self.load(name) if name in self.files else None

    def load(self, name: str) -> Any:
        """Verify the checksum of a file and load it in plain form.

        Raises:
            BadCheckpoint: the file differs from meta.json, or cannot be loaded.
        """
        if name not in self.files:
            raise BadCheckpoint(f"{name} is not in {META}")
        size, digest = self.files[name]
        data = _read_plain_file(self.path / name)
        if len(data) != size:
            raise BadCheckpoint(f"{name} has {len(data)} bytes instead of {size}")
        if hashlib.sha256(data).hexdigest() != digest:
            raise BadCheckpoint(f"{name} does not match its checksum")
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises errors of many types
            reason = str(error).strip().partition("\n")[0]
            raise BadCheckpoint(f"{name} cannot be loaded: {reason}") from error


def versions() -> dict[str, str | None]:
    """Return the versions of pflsim and torch, and the processor."""
    found = environment.versions()
    return {"pflsim": found["pflsim"], "torch": found["torch"], "processor": environment.processor()}


def name_of(checkpoint: Path) -> str:
    """Return the name of a checkpoint's folder and of its parent, for messages."""
    return f"{checkpoint.parent.name}/{checkpoint.name}"


def round_of(checkpoint: Path) -> int | None:
    """Return the round in the name of a checkpoint's folder; None for other names."""
    return int(checkpoint.name.removeprefix("round_")) if FOLDER.fullmatch(checkpoint.name) else None


def by_round(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a folder by round, ascending."""
    found = {number: path for path in folder.glob("round_*") if (number := round_of(path)) is not None}
    return dict(sorted(found.items()))


def as_json(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header as it is after a round trip through JSON: tuples as lists, keys as strings."""
    return json.loads(json.dumps(dict(header), allow_nan=False))


def to_text(
    round_number: int, header: Mapping[str, Any], score: float | None, files: Mapping[str, tuple[int, str]]
) -> str:
    """Return the content of meta.json; see `Checkpoint` for the arguments."""
    content = {
        "format": FORMAT,
        "round": round_number,
        "header": as_json(header),
        "score": score,
        "files": {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()},
        "versions": versions(),
    }
    return json.dumps({**content, "digest": _digest(content)}, indent=1, allow_nan=False) + "\n"


def _digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the content as canonical JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read meta.json of a checkpoint and verify its digest, without reading the other files.

    Raises:
        BadCheckpoint: it is missing, was changed, or has an unknown format or content.
    """
    data = _read_plain_file(folder / META)
    try:
        content = dict(json.loads(data).items())
    except (ValueError, RecursionError, AttributeError):
        raise BadCheckpoint(f"{META} is not a JSON mapping") from None
    if content.get("format") != FORMAT:
        found = content.get("format")
        raise BadCheckpoint(f"format {found!r} is unknown; this version reads format {FORMAT}", damaged=False)
    if content.pop("digest", None) != _digest(content):
        raise BadCheckpoint(f"{META} does not match its checksum")
    try:
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in content["files"].items()}
        header, versions = dict(content["header"]), dict(content["versions"])
        found = Checkpoint(folder, content["round"], header, content["score"], files, versions)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BadCheckpoint(f"{META} has unexpected content") from None
    unknown = [name for name in files if not NAME.fullmatch(name)]
    if unknown:
        raise BadCheckpoint(f"{META} lists {unknown[0]!r}, which is not a checkpoint file")
    if "server.pt" not in files:
        raise BadCheckpoint("server.pt is missing")
    if found.round != round_of(folder):
        raise BadCheckpoint(f"{META} is of round {found.round}")
    return found


def _read_plain_file(path: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        BadCheckpoint: the file is missing, cannot be read, or is a link, pipe or folder.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # O_NONBLOCK: do not wait for a pipe
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise BadCheckpoint(f"{path.name} is not a regular file")
            return file.read()
    except FileNotFoundError:
        raise BadCheckpoint(f"{path.name} is missing") from None
    except OSError as error:
        if path.is_symlink() or path.is_dir():
            raise BadCheckpoint(f"{path.name} is not a regular file") from None
        raise BadCheckpoint(f"{path.name} cannot be read: {error.strerror}", damaged=False) from None
