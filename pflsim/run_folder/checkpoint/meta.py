"""meta.json: the metadata of a checkpoint, with a checksum of each of its files."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

FORMAT = 2
META = "meta.json"
NAME = re.compile(r"server\.pt|client_(\d{3}|[1-9]\d{3,})\.pt")
FOLDER = re.compile(r"round_(\d{4}|[1-9]\d{4,})")


class BadCheckpoint(ValueError):
    """Raised when a checkpoint cannot be used. `damaged` says whether its files differ from what was written."""

    def __init__(self, reason: str, damaged: bool = True):
        super().__init__(reason)
        self.damaged = damaged


@dataclass(frozen=True, slots=True)
class Entry:
    """The size of a file in bytes, and its SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Meta:
    """The content of meta.json, without its format and digest.

    Args:
        round: the round just finished.
        header: the settings of the run, e.g. method, model, seed.
        score: mean validation accuracy of the reported model after the round; None if unknown.
        versions: of pflsim and torch; None if a package is not installed.
        files: every file by name.
    """

    round: int
    header: Mapping[str, Any]
    score: float | None
    files: Mapping[str, Entry]
    versions: Mapping[str, str | None] = field(default_factory=lambda: versions())


def versions() -> dict[str, str | None]:
    """Return the versions of pflsim and torch."""
    try:
        own = metadata.version("pflsim")
    except metadata.PackageNotFoundError:
        own = None
    return {"pflsim": own, "torch": str(torch.__version__)}


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


def to_text(meta: Meta) -> str:
    """Return the content of meta.json."""
    content = {"format": FORMAT, **asdict(meta)}
    return json.dumps({**content, "digest": _digest(content)}, indent=1, allow_nan=False) + "\n"


def _digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the content as canonical JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_meta(folder: Path) -> Meta:
    """Read meta.json of a checkpoint and verify its digest.

    Raises:
        BadCheckpoint: it is missing, was changed, or has an unknown format or content.
    """
    data = read_plain_file(folder / META)
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
        files = {name: Entry(int(entry["size"]), str(entry["sha256"])) for name, entry in content["files"].items()}
        meta = Meta(content["round"], dict(content["header"]), content["score"], files, dict(content["versions"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BadCheckpoint(f"{META} has unexpected content") from None
    unknown = [name for name in files if not NAME.fullmatch(name)]
    if unknown:
        raise BadCheckpoint(f"{META} lists {unknown[0]!r}, which is not a checkpoint file")
    if "server.pt" not in files:
        raise BadCheckpoint("server.pt is missing")
    if meta.round != round_of(folder):
        raise BadCheckpoint(f"{META} is of round {meta.round}")
    return meta


def read_plain_file(path: Path) -> bytes:
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


def read_tensors(folder: Path, name: str, meta: Meta) -> Any:
    """Verify the checksum of a file and load it in plain form.

    Raises:
        BadCheckpoint: the file differs from meta.json, or cannot be loaded.
    """
    entry = meta.files.get(name)
    if entry is None:
        raise BadCheckpoint(f"{name} is not in {META}")
    data = read_plain_file(folder / name)
    if len(data) != entry.size:
        raise BadCheckpoint(f"{name} has {len(data)} bytes instead of {entry.size}")
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise BadCheckpoint(f"{name} does not match its checksum")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises errors of many types
        reason = str(error).strip().partition("\n")[0]
        raise BadCheckpoint(f"{name} cannot be loaded: {reason}") from error
