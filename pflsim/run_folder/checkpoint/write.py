"""Writing checkpoints: aside first, renamed when whole, and only then are others removed."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from pflsim.run_folder.checkpoint.meta import META, BadCheckpoint, Entry, Meta, as_json, read_meta, round_of, to_text
from pflsim.run_folder.checkpoint.state import plain
from pflsim.run_folder.files import sync_folder
from pflsim.types import Tensors


class CheckpointError(OSError):
    """A checkpoint could not be written, e.g. since the disk is full. Those before it are as they were."""

    def __str__(self) -> str:
        """The message without the number."""
        return str(self.strerror)


@dataclass(frozen=True, slots=True)
class Staged:
    """A checkpoint that is written and forced to the disk, and does not count before it is published."""

    round: int
    aside: Path
    final: Path

    def discard(self) -> None:
        """Leave nothing of it."""
        shutil.rmtree(self.aside, ignore_errors=True)

    def publish(self, keep: int) -> Path:
        """Give it its place, and remove what is not to be kept; nothing is removed before that.

        Checkpoints of later rounds go too: the run was resumed from an earlier one, and they are not of this run any
        more.

        Args:
            keep: how many checkpoints stay, the newest ones; at least this one. The one with the best score, the
                earlier of equals, stays as well.

        Returns:
            The new folder.

        Raises:
            CheckpointError: the disk refuses. The checkpoints that were there are there still.
        """
        try:
            with _disk(self.final):
                _put_in_place(self.aside, self.final)
        except BaseException:
            shutil.rmtree(self.aside, ignore_errors=True)
            raise
        with suppress(OSError):  # the new one is safe; what cannot be removed now is removed the next time
            _thin_out(self.final.parent, self.round, keep)
        return self.final


def stage_checkpoint(
    folder: Path,
    round_number: int,
    server: object,
    clients: Iterable[tuple[int, Tensors]],
    header: Mapping[str, Any],
    score: float | None = None,
) -> Staged:
    """Write the state after a round aside, to become `folder`/round_0001.

    Args:
        folder: the run's checkpoints folder.
        round_number: the round just finished.
        server: the server rule's state, or its plain form.
        clients: every client's id and private state; taken one at a time, so that memory stays at one.
        header: what a reader must check first, e.g. method, model, seed; as JSON has it.
        score: mean validation accuracy of the judged model after the round. None, or not a number: there is none.

    Raises:
        CheckpointError: the disk is full, or the like; nothing is left of it.
    """
    final = folder / f"round_{round_number:04d}"
    aside = folder / f".{final.name}.part"
    score = None if score is None or not math.isfinite(score) else float(score)
    state = plain(server)
    try:
        with _disk(final):
            clean_up(folder)
            aside.mkdir(parents=True)
            files = {"server.pt": _save(state, aside / "server.pt")}
        del state
        for client, private in clients:
            name = f"client_{client:03d}.pt"
            state = plain(private)
            with _disk(final):
                files[name] = _save(state, aside / name)
        with _disk(final):
            with (aside / META).open("xb") as file:
                file.write(to_text(Meta(round_number, as_json(header), score, files)).encode())
                _force(file)
            sync_folder(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Staged(round_number, aside, final)


def write_checkpoint(
    folder: Path,
    round_number: int,
    server: object,
    clients: Iterable[tuple[int, Tensors]],
    header: Mapping[str, Any],
    keep: int,
    score: float | None = None,
) -> Path:
    """Stage a checkpoint and publish it; see there."""
    return stage_checkpoint(folder, round_number, server, clients, header, score).publish(keep)


@contextmanager
def _disk(final: Path) -> Iterator[None]:
    """Whatever the disk refuses within is a CheckpointError."""
    try:
        yield
    except OSError as error:
        reason = f"{final.parent.name}/{final.name} could not be written: {error.strerror or error}"
        raise CheckpointError(error.errno, f"{reason}; the checkpoints before it are untouched") from error


class _Writer:
    """Writes through to a file, adding up size and SHA-256; remembers the first error, since torch's own says less."""

    def __init__(self, file: IO[bytes]):
        self.file, self.size, self.hash = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes, all of them; after an error nothing more."""
        count = memoryview(data).nbytes
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
        self.hash.update(data)
        self.size += count
        return count

    def flush(self) -> None:
        """Nothing: the file is forced to the disk once, at the end."""


def _save(state: Any, path: Path) -> Entry:
    with path.open("xb") as file:
        writer = _Writer(file)
        torch.save(state, writer)  # type: ignore[arg-type]  # it needs write and flush only
        if writer.error is not None:
            raise writer.error
        _force(file)
    return Entry(writer.size, writer.hash.hexdigest())


def _force(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _put_in_place(aside: Path, final: Path) -> None:
    """Rename; one of the same round steps aside first and comes back if that fails."""
    before = final.with_name(f".{final.name}.before")
    replaces = final.exists() or final.is_symlink()
    if replaces:
        final.rename(before)
    try:
        aside.rename(final)
        sync_folder(final.parent)
    except OSError:
        if replaces:
            if final.exists():
                final.rename(aside)
            before.rename(final)
        elif final.exists():
            final.rename(aside)
        raise
    if replaces:
        with suppress(OSError):
            _remove(before)


def clean_up(folder: Path) -> None:
    """Remove what a run left that was ended in the middle of writing or removing.

    A checkpoint that had stepped aside for another of its round comes back if that one never came.
    """
    for left in folder.glob(".round_*"):
        final = left.with_name(left.stem.removeprefix("."))
        if left.suffix == ".before" and not final.exists():
            left.rename(final)
        else:
            _delete(left)


def _thin_out(folder: Path, newest: int, keep: int) -> None:
    """Leave the newest `keep` and the best; those of later rounds, and unreadable ones, do not count."""
    found: list[tuple[int, Path, Meta]] = []
    others: list[Path] = []
    for path in folder.glob("round_*"):
        number = round_of(path)
        if number is None:
            continue
        try:
            if number > newest:
                raise BadCheckpoint("later than the newest")
            found.append((number, path, read_meta(path)))
        except BadCheckpoint:
            others.append(path)
    found.sort(key=lambda item: item[0])
    scored = [item for item in found if item[2].score is not None]
    best = max(scored, key=lambda item: item[2].score or 0.0, default=None)  # the first of equals
    kept = {item[1] for item in (*found[-max(keep, 1) :], *([best] if best else []))}
    for path in (*others, *(item[1] for item in found)):
        if path not in kept:
            _remove(path)


def _remove(checkpoint: Path) -> None:
    """Take it out of sight at once, then delete it: half of it must never look like a checkpoint."""
    name = checkpoint.name.removeprefix(".").partition(".")[0]
    _delete(checkpoint.rename(checkpoint.with_name(f".{name}.old")))


def _delete(path: Path) -> None:
    """A folder with all in it, or a link or file itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
