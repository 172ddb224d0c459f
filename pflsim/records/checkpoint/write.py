"""Writes a checkpoint to a temporary folder, renames the folder, and then removes old checkpoints."""

from __future__ import annotations

import hashlib
import io
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import torch

from pflsim.records.checkpoint.meta import META, BadCheckpoint, by_round, read_checkpoint, to_text
from pflsim.records.checkpoint.state import plain
from pflsim.records.files import sync_folder
from pflsim.types import Tensors


class CheckpointError(OSError):
    """Raised when a checkpoint cannot be written, e.g. to a full disk. Earlier checkpoints are unchanged."""

    def __str__(self) -> str:
        """Return the message without the error number."""
        return str(self.strerror)


@dataclass(frozen=True, slots=True)
class Staged:
    """A checkpoint in a temporary folder on the disk, which readers ignore until it is published."""

    round: int
    aside: Path
    final: Path

    def discard(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self.aside, ignore_errors=True)

    def publish(self, keep: int) -> Path:
        """Rename the temporary folder to its final name, then remove old checkpoints.

        Also removes checkpoints of later rounds, which exist if the run was resumed from an earlier one.

        Args:
            keep: the number of newest checkpoints to keep, at least 1. The first checkpoint with the best score is kept
                too.

        Returns:
            The final folder.

        Raises:
            CheckpointError: the disk fails. Earlier checkpoints are unchanged.
        """
        try:
            with _disk_errors(self.final):
                _rename(self.aside, self.final)
        except BaseException:
            self.discard()
            raise
        with suppress(OSError):  # the next call removes the rest
            _remove_old(self.final.parent, self.round, keep)
        return self.final


def stage_checkpoint(
    folder: Path,
    round_number: int,
    server: object,
    clients: Iterable[tuple[int, Tensors]],
    header: Mapping[str, Any],
    score: float | None = None,
    adapted: Iterable[tuple[int, Tensors]] = (),
) -> Staged:
    """Write the state after a round to a temporary folder; `publish` renames it to e.g. `folder`/round_0001.

    Args:
        folder: the run's checkpoints folder.
        round_number: the round just finished.
        server: the server rule's state, or its plain form.
        clients: each client's id and private state. Only one client's state is in memory at a time.
        header: the settings that a resumed run must share, e.g. method, model, seed; JSON values.
        score: mean validation accuracy of the reported model after the round; None or NaN if unknown.
        adapted: client ids with the tensors that a model adapted to the client's examples has instead of the private
            state's; resuming does not need them.

    Raises:
        CheckpointError: the disk fails, e.g. because it is full. The temporary folder is removed.
    """
    final = folder / f"round_{round_number:04d}"
    staged = Staged(round_number, folder / f".{final.name}.part", final)
    score = None if score is None or not math.isfinite(score) else float(score)
    private = ((f"client_{client:03d}.pt", state) for client, state in clients)
    models = ((f"adapted_{client:03d}.pt", state) for client, state in adapted)
    files: dict[str, tuple[int, str]] = {}
    try:
        with _disk_errors(final):
            clean_up(folder)
            folder.mkdir(exist_ok=True)  # not its parents: the run folder may have been moved
            staged.aside.mkdir()
        for name, state in chain([("server.pt", server)], private, models):  # the iterator's own errors pass
            with _disk_errors(final):
                files[name] = _save(plain(state), staged.aside / name)
        with _disk_errors(final):
            with (staged.aside / META).open("xb") as file:
                file.write(to_text(round_number, header, score, files).encode())
                _sync(file)
            sync_folder(staged.aside)
    except BaseException:
        staged.discard()
        raise
    return staged


@contextmanager
def _disk_errors(final: Path) -> Iterator[None]:
    """Raise CheckpointError in place of OSError."""
    try:
        yield
    except OSError as error:
        reason = f"{final.parent.name}/{final.name} could not be written: {error.strerror or error}"
        raise CheckpointError(error.errno, f"{reason}; earlier checkpoints are unchanged") from error


def _save(state: Any, path: Path) -> tuple[int, str]:
    """Write a state to a new file, and return the file's size in bytes and its SHA-256."""
    buffer = io.BytesIO()  # given a file, torch.save would replace the error of a full disk by a less specific one
    torch.save(state, buffer)
    data = buffer.getbuffer()
    with path.open("xb") as file:
        file.write(data)
        _sync(file)
    return data.nbytes, hashlib.sha256(data).hexdigest()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _rename(aside: Path, final: Path) -> None:
    """Rename `aside` to `final`. Moves an existing `final` away first, and restores it if the renaming fails."""
    before = final.with_name(f".{final.name}.before")
    replaces = final.exists() or final.is_symlink()
    if replaces:
        final.rename(before)
    try:
        aside.rename(final)
        sync_folder(final.parent)
    except OSError:
        if final.exists():
            final.rename(aside)
        if replaces:
            before.rename(final)
        raise
    if replaces:
        with suppress(OSError):
            _remove(before)


def clean_up(folder: Path) -> None:
    """Remove temporary folders of interrupted writes and removals.

    Restores a checkpoint that was moved away for a replacement that does not exist.
    """
    for left in folder.glob(".round_*"):
        final = left.with_name(left.stem.removeprefix("."))
        if left.suffix == ".before" and not final.exists():
            left.rename(final)
        else:
            _delete(left)


def _remove_old(folder: Path, newest: int, keep: int) -> None:
    """Remove all checkpoints but the newest `keep` and the best. Later rounds and unreadable checkpoints go first."""
    paths = by_round(folder)
    scores: dict[int, float | None] = {}
    for number, path in paths.items():
        with suppress(BadCheckpoint):
            if number <= newest:
                scores[number] = read_checkpoint(path).score
    best = max((n for n in scores if scores[n] is not None), key=lambda n: scores[n] or 0.0, default=None)
    kept = {*list(scores)[-max(keep, 1) :], best}
    for number in sorted(paths, key=lambda n: n in scores):
        if number not in kept:
            _remove(paths[number])


def _remove(checkpoint: Path) -> None:
    """Rename a checkpoint before deleting it, so that readers never see an incomplete one."""
    name = checkpoint.name.removeprefix(".").partition(".")[0]
    _delete(checkpoint.rename(checkpoint.with_name(f".{name}.old")))


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
