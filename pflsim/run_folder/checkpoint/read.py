"""Reading checkpoints: nothing is used that is not exactly what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pflsim.errors import SettingsError
from pflsim.run_folder.checkpoint.meta import (
    NAME,
    BadCheckpoint,
    Meta,
    as_json,
    read_meta,
    read_tensors,
    round_of,
    versions,
)
from pflsim.run_folder.checkpoint.write import clean_up


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was found whole. Its files are held to their checksums again when they are loaded."""

    path: Path
    meta: Meta

    @property
    def round(self) -> int:
        """The round it was written after."""
        return self.meta.round

    @property
    def header(self) -> Mapping[str, Any]:
        """What the run was."""
        return self.meta.header

    @property
    def score(self) -> float | None:
        """Mean validation accuracy of the judged model after that round; None: not known."""
        return self.meta.score

    @property
    def ids(self) -> tuple[int, ...]:
        """The clients in it, ascending."""
        numbers = [match[1] for name in self.meta.files if (match := NAME.fullmatch(name))]
        return tuple(sorted(int(number) for number in numbers if number is not None))

    def server(self) -> Any:
        """The server rule's state in plain form; `restored` rebuilds it. Raises BadCheckpoint."""
        return read_tensors(self.path, "server.pt", self.meta)

    def client(self, client: int) -> dict[str, Any]:
        """A client's private state. Raises BadCheckpoint."""
        return read_tensors(self.path, f"client_{client:03d}.pt", self.meta)

    def clients(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every client's id and private state, ascending and loaded one at a time."""
        return ((client, self.client(client)) for client in self.ids)


def newest_checkpoint(folder: Path, report: Callable[[str], None], until: int | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole; the others are left where they are.

    Every file's size and SHA-256 are checked, and that it loads. Links and files that meta.json does not name are not
    touched.

    Args:
        folder: the run's checkpoints folder; it need not exist.
        report: called with one line for each newer checkpoint that is not used.
        until: pass over those of later rounds, e.g. since the records end there.

    Returns:
        None where there is none, or all are damaged.

    Raises:
        SettingsError: none can be used, but one may be as good as ever: it cannot be read now, or not by this version.
    """
    with suppress(OSError):  # a folder that cannot be written to can be read all the same
        clean_up(folder)
    numbered = sorted(((n, p) for p in folder.glob("round_*") if (n := round_of(p)) is not None), reverse=True)
    refused: list[str] = []
    usable_elsewhere = False
    used: Checkpoint | None = None
    for number, path in numbered:
        name = f"{path.parent.name}/{path.name}"
        if until is not None and number > until:
            refused.append(f"{name} is passed over (the records end at round {until})")
            continue
        try:
            used = verified(path)
            break
        except BadCheckpoint as bad:
            refused.append(f"{name} {'is damaged' if bad.damaged else 'cannot be used'} ({bad})")
            usable_elsewhere |= not bad.damaged
    if used is None and usable_elsewhere:
        raise SettingsError(
            "\n".join(refused) + f"\nnothing is damaged there: mend that, or remove {folder} for the run to begin again"
        )
    instead = f"{used.path.name} is used" if used else "there is no other that can be used"
    for line in refused:
        report(f"{line}; {instead}")
    return used


def verified(path: Path) -> Checkpoint:
    """Look at everything in a checkpoint, one file at a time.

    Raises:
        BadCheckpoint: something is not what was written.
    """
    if path.is_symlink() or not path.is_dir():
        raise BadCheckpoint("it is not a folder")
    meta = read_meta(path)
    for name in meta.files:
        read_tensors(path, name, meta)
    return Checkpoint(path, meta)


def check_header(checkpoint: Checkpoint, header: Mapping[str, Any], report: Callable[[str], None]) -> None:
    """Hold a checkpoint to the run that is to continue from it.

    Args:
        checkpoint: where it would continue.
        header: what the run would write into its own checkpoints.
        report: called with one line for each version that differs, which may change results in the last bits.

    Raises:
        SettingsError: the headers differ; names every difference.
    """
    saved, own = _flat(checkpoint.header), _flat(as_json(header))
    differing = [k for k in {**saved, **own} if saved.get(k) != own.get(k)]
    if differing:
        there, here = (", ".join(f"{k}={side.get(k)}" for k in differing) for side in (saved, own))
        name = f"{checkpoint.path.parent.name}/{checkpoint.path.name}"
        raise SettingsError(f"{name} is of a run with {there}, but this one has {here}: it cannot continue from there")
    for name, version in versions().items():
        other = checkpoint.meta.versions.get(name)
        if other != version:
            report(f"the run was saved with {name} {other} and continues with {version}: the last bits may differ")


def _flat(header: Mapping[str, Any]) -> dict[str, Any]:
    """The header with its settings beside the rest."""
    return {**{k: v for k, v in header.items() if k != "settings"}, **(header.get("settings") or {})}


def read_state(folder: Path, name: str) -> Any:
    """Read `server` or `client_003` of a checkpoint, in plain form.

    Raises:
        ValueError: the file is not what meta.json says it is.
    """
    try:
        return read_tensors(folder, f"{name}.pt", read_meta(folder))
    except BadCheckpoint as bad:
        raise ValueError(f"{folder} is damaged: {bad}") from bad
