"""Writes and reads files of a run folder that a run only writes, or writes in two steps."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from torch import Tensor

from pflsim.messages import Message, Prototypes, Uplink
from pflsim.records.checkpoint_read import read_checkpoint
from pflsim.records.checkpoint_write import stage_checkpoint
from pflsim.types import Tensors


def write_checkpoint(
    folder: Path,
    round_number: int,
    server: object,
    clients: Iterable[tuple[int, Tensors]],
    header: Mapping[str, Any],
    keep: int,
    score: float | None = None,
) -> Path:
    """Call `stage_checkpoint` and `Staged.publish`, and return the folder."""
    return stage_checkpoint(folder, round_number, server, clients, header, score).publish(keep)


def read_state(folder: Path, name: str) -> Any:
    """Read `server` or `client_003` of a checkpoint, in plain form."""
    (kind, _, client), checkpoint = name.partition("_"), read_checkpoint(folder)
    return checkpoint.client(int(client)) if kind == "client" else checkpoint.load(f"{name}.pt")


def read_message(path: Path) -> Message | Uplink:
    """Read a message: an `Uplink` if the file's name starts with "up_", else a `Message`.

    Raises:
        ValueError: a tensor's name does not start with one of the four sections.
    """
    tensors, header = read_server(path)
    sections: dict[str, dict[str, Tensor]] = {"weights": {}, "prototypes": {}, "extra": {}, "numbers": {}}
    for name, tensor in tensors.items():
        section, _, key = name.partition("/")
        if section not in sections:
            raise ValueError(f"{path}: unexpected tensor {name!r}; expected names in {', '.join(sections)}")
        sections[section][key] = tensor
    means_and_counts = sections["prototypes"]
    prototypes = Prototypes(means_and_counts["means"], means_and_counts["counts"]) if means_and_counts else None
    numbers = {name: float(value) for name, value in sections["numbers"].items()}
    content = sections["weights"], prototypes, sections["extra"], numbers
    if path.name.startswith("up_"):
        return Uplink(*content, int(header["client"]), int(header["num_examples"]))
    return Message(*content)


def read_server(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what `write_trace` wrote: tensors by name, and the texts of the header."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


class FailingCalls:
    """Makes the n-th call of some functions raise an error; `dies`: all later ones too, as if the process were gone."""

    def __init__(self, patch: pytest.MonkeyPatch, fails_at: int, error: BaseException, dies: bool, *functions: Any):
        self.count, self.fails_at, self.error, self.dies = 0, fails_at, error, dies
        for owner, name in functions:
            patch.setattr(owner, name, self._failing(getattr(owner, name)))

    def _failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            self.count += 1
            if self.count == self.fails_at or (self.dies and self.count > self.fails_at):
                raise self.error
            return function(*arguments, **more)

        return call
