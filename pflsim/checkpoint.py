"""The state of a run between two rounds, as one folder that appears whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflsim.types import Tensors

FORMAT = 1


def plain(value: object) -> Any:
    """Turn a state into what `torch.load` reads with weights_only.

    A state is made of frozen dataclasses (each becomes a mapping of its fields), mappings, sequences, tensors, numbers
    and strings.

    Raises:
        TypeError: something else is in it.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()  # a view would save its whole base
    if value is None:
        return None
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # a NumPy float is a float, but weights_only would refuse it
    raise TypeError(f"a state may hold dataclasses, mappings, sequences, tensors and plain values, not {type(value)}")


def write_checkpoint(
    folder: Path,
    round_number: int,
    server: object,
    clients: Iterable[tuple[int, Tensors]],
    header: Mapping[str, str | int],
    keep: int,
) -> Path:
    """Save the state after a round under `folder`/round_0001 and remove the oldest beyond `keep`.

    Everything is written aside first and renamed when complete; meta.json has the SHA-256 of each file.

    Args:
        folder: the run's checkpoints folder.
        round_number: the round just finished.
        server: the server rule's state.
        clients: every client's id and private state; taken one at a time, so that memory stays at one.
        header: what a reader must check first, e.g. method, model, seed.
        keep: how many checkpoints stay, the newest ones.

    Returns:
        The new folder.
    """
    final = folder / f"round_{round_number:04d}"
    aside = folder / f".{final.name}.part"
    for left in folder.glob(".round_*"):  # by a run that was ended in the middle of this
        shutil.rmtree(left)
    aside.mkdir(parents=True)
    torch.save(plain(server), aside / "server.pt")
    for client, state in clients:
        torch.save(plain(state), aside / f"client_{client:03d}.pt")
    digests = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(aside.iterdir())}
    meta = {"format": FORMAT, "round": round_number, **header, "sha256": digests}
    (aside / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    for path in aside.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if final.exists():
        _remove(final)
    aside.rename(final)
    for old in sorted(folder.glob("round_*"), key=_round_of)[: -max(keep, 1)]:
        _remove(old)
    return final


def _round_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def _remove(checkpoint: Path) -> None:
    """Take it out of sight at once, then delete it: half of it must never look like a checkpoint."""
    shutil.rmtree(checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.old")))


def read_state(folder: Path, name: str) -> Any:
    """Read `server` or `client_003` of a checkpoint, in plain form.

    Raises:
        ValueError: the file is not what meta.json says it is.
    """
    path = folder / f"{name}.pt"
    meta = json.loads((folder / "meta.json").read_text())
    if hashlib.sha256(path.read_bytes()).hexdigest() != meta["sha256"].get(path.name):
        raise ValueError(f"{path} is damaged: its contents do not match the checksum in meta.json")
    return torch.load(path, weights_only=True)
