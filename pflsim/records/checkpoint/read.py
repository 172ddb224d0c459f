"""Finds, verifies and reads checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pflsim.config.settings import Settings, dotted
from pflsim.errors import SettingsError
from pflsim.records.checkpoint.meta import (
    BadCheckpoint,
    Checkpoint,
    as_json,
    by_round,
    name_of,
    read_checkpoint,
    versions,
)
from pflsim.records.checkpoint.write import clean_up


def newest_checkpoint(folder: Path, report: Callable[[str], None], until: int | None = None) -> Checkpoint | None:
    """Return the newest undamaged checkpoint; None if there is none.

    Verifies the size and SHA-256 of every file, and that it can be loaded. Keeps damaged checkpoints.

    Args:
        folder: the run's checkpoints folder; it may not exist.
        report: called with one line for each newer checkpoint that is not used.
        until: ignore checkpoints of later rounds.

    Raises:
        SettingsError: no checkpoint can be used, but one is undamaged: it is not readable now, or has another format.
    """
    with suppress(OSError):  # the folder may be read-only
        clean_up(folder)
    refused: list[str] = []
    undamaged = False
    used: Checkpoint | None = None
    for number, path in reversed(by_round(folder).items()):
        if until is not None and number > until:
            refused.append(f"{name_of(path)} is ignored (the records end at round {until})")
            continue
        try:
            used = verified(path)
            break
        except BadCheckpoint as bad:
            refused.append(f"{name_of(path)} {'is damaged' if bad.damaged else 'cannot be used'} ({bad})")
            undamaged |= not bad.damaged
    if used is None and undamaged:
        refused.append(f"make these checkpoints readable, or remove {folder} to start from round 1")
        raise SettingsError("\n".join(refused))
    instead = f"{used.path.name} is used instead" if used else "there is no other checkpoint"
    for line in refused:
        report(f"{line}; {instead}")
    return used


def choose_checkpoint(folder: Path, asked: str) -> Checkpoint:
    """Return a checkpoint by name, without verifying its files. Does not modify the folder, so the run may be active.

    Args:
        folder: the run's checkpoints folder.
        asked: "last"; "best", the first one with the highest score; or a round.

    Raises:
        SettingsError: there is no such checkpoint, or its meta.json is damaged.
    """
    found = by_round(folder)
    if not found:
        raise SettingsError(f"{folder.parent} has no checkpoint; save some with checkpoint.every=N")
    rounds = f"the run has checkpoints of rounds {', '.join(map(str, found))}"

    def read(number: int) -> Checkpoint:
        try:
            return read_checkpoint(found[number])
        except BadCheckpoint as bad:
            raise SettingsError(f"{name_of(found[number])} cannot be used: {bad}; {rounds}") from bad

    if asked == "last":
        return read(max(found))
    if asked == "best":
        scored = [c for c in map(read, found) if c.score is not None]
        if not scored:
            raise SettingsError(f"no checkpoint has a validation score, so there is no best one; {rounds}")
        return max(scored, key=lambda c: c.score or 0.0)
    if not asked.isdecimal():
        raise SettingsError(f"round {asked!r}: expected best, last or a number; {rounds}")
    if int(asked) not in found:
        raise SettingsError(f"there is no checkpoint of round {asked}; {rounds}")
    return read(int(asked))


def verified(path: Path) -> Checkpoint:
    """Verify and load every file of a checkpoint, one at a time, and return the checkpoint.

    Raises:
        BadCheckpoint: the checkpoint is damaged or cannot be read.
    """
    if path.is_symlink() or not path.is_dir():
        raise BadCheckpoint("it is not a folder")
    checkpoint = read_checkpoint(path)
    for name in checkpoint.files:
        checkpoint.load(name)
    return checkpoint


def check_header(checkpoint: Checkpoint, header: Mapping[str, Any], report: Callable[[str], None]) -> None:
    """Check that a run can resume from a checkpoint.

    Args:
        checkpoint: the checkpoint.
        header: the header that the run writes to its own checkpoints.
        report: called with one line for each version that differs, and for another processor: the last bits may differ.

    Raises:
        SettingsError: the headers differ; names every difference.
    """
    own, default = _flat(as_json(header)), as_json(dotted(asdict(Settings())))
    added = {key: default[key] for key in own if key in default}  # settings that did not exist when it was saved
    saved = {**added, **_flat(checkpoint.header)}
    differing = [k for k in {**saved, **own} if saved.get(k) != own.get(k)]
    if differing:
        theirs, ours = (", ".join(f"{k}={side.get(k)}" for k in differing) for side in (saved, own))
        what = f"{name_of(checkpoint.path)}, which was saved with {theirs}"
        raise SettingsError(f"the run cannot resume from {what}: this run has {ours}")
    for name, version in versions().items():
        other = checkpoint.versions.get(name, version)
        if other != version:
            report(f"the run was saved with {name} {other} and resumes with {version}: the last bits may differ")


def _flat(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header with its settings next to the other entries."""
    return {**{k: v for k, v in header.items() if k != "settings"}, **(header.get("settings") or {})}
