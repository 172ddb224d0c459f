"""Writes a checkpoint to a temporary folder, renames the folder, and then removes old checkpoints."""

import dataclasses
import hashlib
import io
import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflsim.errors import SettingsError
from pflsim.records.checkpoint_read import FORMAT, META, BadCheckpoint, by_round, read_checkpoint, versions
from pflsim.records.files import write_atomically
from pflsim.types import Tensors

CLIENTS_PER_FILE, BYTES_PER_FILE = 128, 2**26
"""A file ends with the client that reaches one of these numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Staged:
    """A checkpoint in a temporary folder on the disk, which readers ignore until it is published."""

    round: int
    aside: Path
    final: Path
    predictions: bytes = b""

    def publish(self, keep: int) -> Path:
        """Rename the temporary folder to its final name, then remove old checkpoints.

        Replaces a checkpoint of the same round and removes those of later rounds, which exist if the run was resumed
        from an earlier one.

        Args:
            keep: the number of newest checkpoints to keep, at least 1. The first checkpoint with the best score is kept
                too.

        Returns:
            The final folder.

        Raises:
            OSError: the disk fails. Earlier checkpoints are unchanged.
        """
        if self.final.exists():
            _remove(self.final)
        self.aside.rename(self.final)
        with suppress(OSError, SettingsError):  # the next call removes the rest
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
    predictions: bytes = b"",
) -> Staged:
    """Write the state after a round to a temporary folder; `publish` renames it to e.g. `folder`/round_0001.

    Args:
        folder: the run's checkpoints folder.
        round_number: the round just finished.
        server: the server rule's state, or its containers.
        clients: each client's id and private state, by ascending id. Only the states of one file are in memory at a
            time; one that several of them have is written once.
        header: the settings that a resumed run must share, e.g. method, model, seed; JSON values.
        score: mean validation accuracy of the reported model after the round; None or NaN if unknown.
        adapted: client ids with the tensors that a model adapted to the client's examples has instead of the private
            state's; resuming does not need them.
        predictions: content of predictions.npz after the round; empty: there is none.

    Raises:
        OSError: the disk fails, e.g. because it is full. The temporary folder is removed.
    """
    final = folder / f"round_{round_number:04d}"
    staged = Staged(round_number, folder / f".{final.name}.part", final, predictions)
    files, ids = dict[str, str](), dict[str, list[int]]()
    try:
        remove_parts(folder)
        folder.mkdir(exist_ok=True)  # not its parents: the run folder may have been moved
        staged.aside.mkdir()
        files["server.pt"] = _save(staged.aside / "server.pt", to_containers(server))
        for name, states in chain(_in_groups("clients", clients), _in_groups("adapted", adapted)):
            once = {id(state): to_containers(state) for state in states.values()}  # all initial states are one object
            content = {client: once[id(state)] for client, state in states.items()}
            files[name], ids[name] = _save(staged.aside / name, content), list(content)
        if predictions:
            content = torch.frombuffer(bytearray(predictions), dtype=torch.uint8)
            files["predictions.pt"] = _save(staged.aside / "predictions.pt", content)
        meta = {
            "format": FORMAT,
            "round": round_number,
            "header": dict(header),
            "score": score if score is not None and math.isfinite(score) else None,
            "files": files,
            "ids": ids,
            "versions": versions(),
        }
        write_atomically(staged.aside / META, json.dumps(meta, indent=1, allow_nan=False))
    except BaseException:
        shutil.rmtree(staged.aside, ignore_errors=True)
        raise
    return staged


def _in_groups(kind: str, states: Iterable[tuple[int, Tensors]]) -> Iterator[tuple[str, dict[int, Tensors]]]:
    """Yield the name of each file, and the states in it by client; which ones does not depend on the placement."""
    group, size = dict[int, Tensors](), 0
    for client, state in states:
        group[client] = state
        size += sum(value.nbytes for value in state.values())
        if len(group) == CLIENTS_PER_FILE or size >= BYTES_PER_FILE:
            yield f"{kind}_{min(group):06d}.pt", group
            group, size = {}, 0
    if group:
        yield f"{kind}_{min(group):06d}.pt", group


def remove_parts(folder: Path) -> None:
    """Remove what interrupted writes and removals have left among the checkpoints."""
    for left in folder.glob(".round_*"):
        shutil.rmtree(left)


def to_containers(value: object) -> Any:
    """Return a state as containers that `torch.load` reads with weights_only; `from_containers` rebuilds it.

    A state consists of dataclasses (each becomes a dict of its fields), mappings, sequences, tensors, numbers and
    strings. Tensors are copied. Dense tensors keep their strides, since the order of sums may depend on them.

    Raises:
        TypeError: the state contains a value of another type.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_containers(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {to_containers(key): to_containers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(to_containers, value))
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)  # saving a view would save its whole base
    if isinstance(value, str):
        return sys.intern(str(value))  # pickle writes equal strings once if they are one object
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)  # weights_only rejects NumPy floats, which are floats
    if value is None:
        return None
    expected = "dataclasses, mappings, sequences, tensors, numbers and strings"
    raise TypeError(f"unexpected {type(value)} in a state; expected {expected}")


def to_bytes(content: object) -> bytes:
    """Return what `torch.save` writes to a file."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _save(path: Path, content: object) -> str:
    """Write containers to a new file, and return the file's SHA-256."""
    data = to_bytes(content)  # given a file, torch.save would replace the error of a full disk by a less specific one
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()


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
    shutil.rmtree(checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old")))
