"""Finds, verifies and reads checkpoints."""

import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from pflsim.config.settings import Settings, dotted
from pflsim.errors import SettingsError, in_one_line
from pflsim.records import environment
from pflsim.records.files import valid
from pflsim.records.older_settings import with_older

META = "meta.json"
FORMAT = 2
"""Of checkpoints."""
State = TypeVar("State")
READ_ANEW = tuple(f"pflsim.data.sources.{name}.load" for name in ("table", "text", "image_folder", "domains", "npz"))
"""Data that runs without data_card.json may have read as other examples."""
Report = Callable[[str], None]


class BadCheckpoint(SettingsError):
    """Raised when a checkpoint is damaged."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint. Its methods verify the SHA-256 of each file that they load, and raise BadCheckpoint.

    Args:
        path: its folder.
        round: the round just finished.
        header: the settings of the run, e.g. method, model, seed.
        score: mean validation accuracy of the reported model after the round; None if unknown.
        files: the SHA-256 of every file by name.
        ids: the clients in each file of private states or of adapted models.
        versions: of pflsim and torch (None if a package is not installed), and the processor.
    """

    path: Path
    round: int
    header: Mapping[str, Any]
    score: float | None
    files: Mapping[str, str]
    ids: Mapping[str, tuple[int, ...]]
    versions: Mapping[str, str | None]

    def server(self) -> Any:
        """Return the containers of the server rule's state; `from_containers` rebuilds it."""
        return self.load("server.pt")

    def clients(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each client's id and private state by ascending id. Loads a file at a time."""
        return (pair for name in self.ids if name.startswith("clients") for pair in self.load(name).items())

    def client(self, client: int) -> dict[str, Any]:
        """Return the private state of a client."""
        if (state := self._of("clients", client)) is None:
            raise BadCheckpoint(f"{self.path} has no state of client {client}")
        return state

    def adapted(self, client: int) -> dict[str, Any] | None:
        """Return the tensors of a client's adapted model that differ from its private state; None: not stored."""
        return self._of("adapted", client)

    def _of(self, kind: str, client: int) -> dict[str, Any] | None:
        names = (name for name, ids in self.ids.items() if name.startswith(kind) and client in ids)
        return next((self.load(name)[client] for name in names), None)

    def predictions(self) -> bytes:
        """Return the content of predictions.npz after the round; empty: there was none."""
        return self.load("predictions.pt").numpy().tobytes() if "predictions.pt" in self.files else b""

    def load(self, name: str) -> Any:
        """Return the content of a file.

        Raises:
            BadCheckpoint: the file does not match its SHA-256 in meta.json, cannot be loaded, or has other clients.
        """
        data = _read(self.path / name)
        if hashlib.sha256(data).hexdigest() != self.files.get(name):
            raise BadCheckpoint(f"{self.path / name} does not match its checksum")
        try:
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises errors of many types
            reason = str(error).strip().partition("\n")[0]
            raise BadCheckpoint(f"{self.path / name} cannot be loaded: {reason}") from error
        if name in self.ids and list(found) != list(self.ids[name]):
            raise BadCheckpoint(f"{self.path / name} does not have the clients that {META} names")
        return found


def from_containers(kind: type[State], saved: object) -> State:
    """Rebuild a server's state from its containers, by the type annotations of its class.

    Args:
        kind: the class of the state.
        saved: the result of `to_containers` for a state of this class.

    Raises:
        BadCheckpoint: a saved value does not have the annotated type.
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # slow to import, and only resuming needs it

    adapter: Any = TypeAdapter(tuple[kind], config=ConfigDict(arbitrary_types_allowed=True, extra="forbid"))  # type: ignore[valid-type]
    try:
        return adapter.validate_python((saved,))[0]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("state", *first["loc"][1:])))
        why = f"{where}: {first['msg']}; use the version of the method that saved it"
        raise BadCheckpoint(f"the server's state cannot be restored: {why}") from None


def versions() -> dict[str, str | None]:
    """Return the versions of pflsim and torch, and the processor."""
    found = environment.versions()
    return {"pflsim": found["pflsim"], "torch": found["torch"], "processor": environment.processor()}


def name_of(checkpoint: Path) -> str:
    """Return the name of a checkpoint's folder and of its parent, for messages."""
    return f"{checkpoint.parent.name}/{checkpoint.name}"


def by_round(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a folder by round, ascending."""
    return dict(sorted((int(path.name[6:]), path) for path in folder.glob("round_*") if path.name[6:].isdecimal()))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read meta.json of a checkpoint, without reading the other files.

    Raises:
        BadCheckpoint: it is missing or damaged.
        SettingsError: it has another format.
    """
    path = folder / META
    try:
        content = valid(Mapping[str, Any], json.loads(_read(path)))
        environment.check_format(content.get("format"), folder, FORMAT)
        found = valid(Checkpoint, {**content, "path": str(folder)})
        if by_round(folder.parent).get(found.round) != folder:
            raise ValueError(f"it has round {found.round}")
    except SettingsError:
        raise
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is damaged: {error}") from None
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is missing") from None


@contextmanager
def fitting(checkpoint: Path) -> Iterator[None]:
    """Raise an error inside the block, where states are loaded into modules, as `BadCheckpoint`."""
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:  # torch and rules raise errors of many types
        raise BadCheckpoint(f"{checkpoint} is damaged: {in_one_line(error)}") from error


def newest_checkpoint(
    folder: Path, report: Report, until: int | None = None, check: Callable[[Checkpoint], None] = lambda found: None
) -> Checkpoint | None:
    """Return the newest undamaged checkpoint; None if there is none.

    Verifies the SHA-256 of every file, and that it can be loaded. Keeps damaged checkpoints.

    Args:
        folder: the run's checkpoints folder; it may not exist.
        report: called with one line for each newer checkpoint that is not used.
        until: ignore checkpoints of later rounds.
        check: raises BadCheckpoint if the states of a checkpoint do not fit the run.

    Raises:
        SettingsError: a checkpoint has another format.
    """
    for number, path in reversed(by_round(folder).items()):
        if until is not None and number > until:
            report(f"{name_of(path)} is not used: the records end at round {until}")
            continue
        try:
            found = read_checkpoint(path)
            for name in found.files:
                found.load(name)
            check(found)
            return found
        except BadCheckpoint as bad:
            report(f"{bad}: this checkpoint is not used")
    return None


def choose_checkpoint(folder: Path, asked: str | None, best: int | None = None) -> Checkpoint:
    """Return a checkpoint by name, without verifying its files.

    Args:
        folder: the run's checkpoints folder.
        asked: "last", "best" or a round; None: the best one, and the last one, with a line that says so, if the best
            one was not saved.
        best: the round that is best by validation; None: the run has no validation data.

    Raises:
        SettingsError: there is no such checkpoint, or its meta.json is damaged.
    """
    paths = by_round(folder)
    if not paths:
        raise SettingsError(f"{folder.parent} has no checkpoint; save some with checkpoint.every=N")
    last, why = max(paths), f"round {best} is best by validation, and checkpoint.best=true would have saved it"
    if asked is None:
        if best not in (None, *paths):
            print(f"round {last} is used, the last one with a checkpoint: {why}", file=sys.stderr)
        asked = str(best if best in paths else last)
    chosen = {"last": str(last), "best": str(best)}.get(asked, asked)
    named = {str(number): path for number, path in paths.items()}
    if chosen not in named:
        if asked != "best":
            why = "expected best, last or a number"
        elif best is None:
            why = "no round was evaluated on validation data"
        saved = f"the run has checkpoints of rounds {', '.join(named)}"
        raise SettingsError(f"there is no checkpoint {asked}: {why}; {saved}")
    return read_checkpoint(named[chosen])


def check_header(checkpoint: Checkpoint, header: Mapping[str, Any], report: Report) -> None:
    """Check that a run can resume from a checkpoint.

    Args:
        checkpoint: the checkpoint.
        header: the header that the run writes to its own checkpoints.
        report: called with one line for each version that differs, and for another processor: the last bits may differ.

    Raises:
        SettingsError: the headers differ; names every difference.
    """
    sides = checkpoint.header, json.loads(json.dumps(dict(header)))  # JSON has lists for tuples
    saved, own = ({**side, **with_older(side.get("settings") or {}), "settings": None} for side in sides)
    default = dotted(asdict(Settings()))  # of settings that are newer than the checkpoint
    differing = [key for key in {**saved, **own} if saved.get(key, default.get(key)) != own.get(key)]
    if differing:
        theirs, ours = (", ".join(f"{key}={side.get(key)}" for key in differing) for side in (saved, own))
        what = f"{name_of(checkpoint.path)}, which was saved with {theirs}"
        old = "partition_hash" in differing and str(own.get("data._target_")).endswith(READ_ANEW)
        old &= not (checkpoint.path.parents[1] / "data_card.json").exists()
        said = f"{ours}; such data are read differently since the version that saved it" if old else ours
        raise SettingsError(f"the run cannot resume from {what}: this run has {said}")
    for name, version in versions().items():
        if (other := checkpoint.versions[name]) != version:
            report(f"the run was saved with {name} {other} and resumes with {version}: the last bits may differ")
