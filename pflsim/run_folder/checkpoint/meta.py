"""meta.json: what a checkpoint says of itself, and whether its files are what it says."""

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
    """A checkpoint that is not used; the message says why in few words. `damaged`: it was usable once."""

    def __init__(self, reason: str, damaged: bool = True):
        super().__init__(reason)
        self.damaged = damaged


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the checkpoint: its size in bytes and the SHA-256 of its contents."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Meta:
    """The contents of meta.json, but for the format and the digest over all the rest.

    Args:
        round: the round just finished.
        header: what the run is, e.g. method, model, seed.
        score: mean validation accuracy of the judged model after the round; None: not known.
        versions: of this package and of torch; None: not installed as a package.
        files: every file by name.
    """

    round: int
    header: Mapping[str, Any]
    score: float | None
    files: Mapping[str, Entry]
    versions: Mapping[str, str | None] = field(default_factory=lambda: versions())


def versions() -> dict[str, str | None]:
    """This package's version and torch's."""
    try:
        own = metadata.version("pflsim")
    except metadata.PackageNotFoundError:
        own = None
    return {"pflsim": own, "torch": str(torch.__version__)}


def round_of(checkpoint: Path) -> int | None:
    """The round in the name of a checkpoint's folder, or None where it is not such a name."""
    return int(checkpoint.name.removeprefix("round_")) if FOLDER.fullmatch(checkpoint.name) else None


def as_json(header: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: tuples as lists, keys as text."""
    return json.loads(json.dumps(dict(header), allow_nan=False))


def to_text(meta: Meta) -> str:
    """The contents of meta.json."""
    content = {"format": FORMAT, **asdict(meta)}
    return json.dumps({**content, "digest": _digest(content)}, indent=1, allow_nan=False) + "\n"


def _digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of the contents in one spelling, so that the layout of the file does not matter."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_meta(folder: Path) -> Meta:
    """Read meta.json of a checkpoint and hold it to its own digest.

    Raises:
        BadCheckpoint: it is missing, was changed, or has a format or contents that are not known here.
    """
    data = read_plain_file(folder / META)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise BadCheckpoint(f"{META} is not readable") from None
    if not isinstance(content, dict):
        raise BadCheckpoint(f"{META} is not readable")
    if content.get("format") != FORMAT:
        reason = f"it has format {content.get('format')!r}, this version reads format {FORMAT}"
        raise BadCheckpoint(reason, damaged=False)
    if content.pop("digest", None) != _digest(content):
        raise BadCheckpoint(f"{META} does not match its own checksum")
    try:
        files = {name: Entry(int(entry["size"]), str(entry["sha256"])) for name, entry in content["files"].items()}
        meta = Meta(content["round"], dict(content["header"]), content["score"], files, dict(content["versions"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BadCheckpoint(f"{META} is not as it was written") from None
    for name in files:
        if not NAME.fullmatch(name):
            raise BadCheckpoint(f"{META} names {name!r}, which is no file of a checkpoint")
    if "server.pt" not in files:
        raise BadCheckpoint("server.pt is missing")
    if meta.round != round_of(folder):
        raise BadCheckpoint(f"{META} is that of round {meta.round}")
    return meta


def read_plain_file(path: Path) -> bytes:
    """The contents of a file that is no link, pipe or folder.

    Raises:
        BadCheckpoint: it is missing, something else, or cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for a writer
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise BadCheckpoint(f"{path.name} is not a plain file")
            return file.read()
    except FileNotFoundError:
        raise BadCheckpoint(f"{path.name} is missing") from None
    except OSError as error:
        if path.is_symlink() or path.is_dir():
            raise BadCheckpoint(f"{path.name} is not a plain file") from None
        raise BadCheckpoint(f"{path.name} cannot be read: {error.strerror}", damaged=False) from None


def read_tensors(folder: Path, name: str, meta: Meta) -> Any:
    """Load one file in plain form, once it has proved to be what meta.json says.

    Raises:
        BadCheckpoint: it is not, or does not load.
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
    except Exception as error:  # torch raises whatever it comes upon
        reason = str(error).strip().partition("\n")[0]
        raise BadCheckpoint(f"{name} cannot be loaded: {reason}") from error
