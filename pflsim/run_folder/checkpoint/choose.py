"""One of a run's checkpoints, for whoever only reads: the run may be going on, and nothing in its folder is touched."""

from __future__ import annotations

from pathlib import Path

from pflsim.errors import SettingsError
from pflsim.run_folder.checkpoint.meta import BadCheckpoint, read_meta, round_of
from pflsim.run_folder.checkpoint.read import Checkpoint


def choose_checkpoint(folder: Path, asked: str) -> Checkpoint:
    """The checkpoint that is asked for; its files are held to their checksums when they are loaded.

    Args:
        folder: the run's checkpoints folder.
        asked: `last`; `best`, the one with the highest validation score, the first of equals; or a round.

    Raises:
        SettingsError: there is no such checkpoint, or it is damaged; says which rounds there are.
    """
    found = {n: p for p in folder.glob("round_*") if (n := round_of(p)) is not None}
    if not found:
        raise SettingsError(f"{folder.parent} has no checkpoint: a run has them with checkpoint.every=N, or at its end")
    kept = f"checkpoints are kept of round{'s' * (len(found) > 1)} {', '.join(map(str, sorted(found)))}"
    if asked == "last":
        return _read(found[max(found)], kept)
    if asked == "best":
        scored = [c for c in (_read(found[n], kept) for n in sorted(found)) if c.score is not None]
        if not scored:
            raise SettingsError(f"no checkpoint has a validation score, so none is the best; {kept}")
        return max(scored, key=lambda c: c.score or 0.0)
    if not asked.isdecimal():
        raise SettingsError(f"round {asked!r}: expected best, last or a number; {kept}")
    if int(asked) not in found:
        raise SettingsError(f"there is no checkpoint of round {asked}; {kept}")
    return _read(found[int(asked)], kept)


def _read(path: Path, kept: str) -> Checkpoint:
    try:
        return Checkpoint(path, read_meta(path))
    except BadCheckpoint as bad:
        raise SettingsError(f"{path.parent.name}/{path.name} cannot be used: {bad}; {kept}") from bad
