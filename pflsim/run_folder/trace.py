"""Saves the messages of traced rounds as safetensors, e.g. to check the fusion with numpy.

    trace/round_0001/down_003.safetensors   what client 3 received at the start of round 1
    trace/round_0001/up_003.safetensors     what client 3 sent after training
    trace/round_0001/server.safetensors     what the server rule reports after fusion

Tensor names: `weights/<state_dict key>`, `prototypes/means` [C, D] with `prototypes/counts` [C], `extra/<name>` and
`numbers/<name>` (0-d float64). Header: method, round, client, num_examples, as strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from pflsim.messages import Message, Prototypes, Uplink
from pflsim.run_folder.files import write_atomically
from pflsim.types import Tensors


def trace_folder(folder: Path, round_number: int) -> Path:
    """Return the folder with the messages of a round."""
    return folder / "trace" / f"round_{round_number:04d}"


def write_message(
    folder: Path,
    round_number: int,
    direction: Literal["down", "up"],
    client: int,
    message: Message,
    method: str,
    num_examples: int,
) -> Path:
    """Write one message of a round.

    Args:
        folder: the run folder.
        round_number: the round, from 1.
        direction: "down" (server to client) or "up".
        client: the client's id.
        message: the message. Its tensors are copied, so they may be views or share memory.
        method: the method's name, for the header.
        num_examples: the client's training examples, for the header.

    Returns:
        The path of the file.
    """
    header = {"method": method, "round": str(round_number), "client": str(client), "num_examples": str(num_examples)}
    path = trace_folder(folder, round_number) / f"{direction}_{client:03d}.safetensors"
    _write(path, _flatten(message), header)
    return path


def write_server(folder: Path, round_number: int, tensors: Tensors, metadata: Mapping[str, str]) -> Path:
    """Write what the server rule reports after a round's fusion, e.g. `zeta/<unit>` [N, N].

    Args:
        folder: the run folder.
        round_number: the round, from 1.
        tensors: tensors by name.
        metadata: texts for the header, e.g. the names of the units. The round is added.
    """
    path = trace_folder(folder, round_number) / "server.safetensors"
    _write(path, tensors, {"round": str(round_number), **metadata})
    return path


def read_message(path: Path) -> Message | Uplink:
    """Read a message: an `Uplink` if the file's name starts with "up_", else a `Message`.

    Raises:
        ValueError: a tensor's name does not start with one of the four sections.
    """
    tensors, header = _read(path)
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
    """Read what `write_server` wrote: tensors by name, and the texts of the header."""
    return _read(path)


def _flatten(message: Message) -> dict[str, Tensor]:
    named = {f"weights/{name}": tensor for name, tensor in message.weights.items()}
    if message.prototypes is not None:
        named["prototypes/means"] = message.prototypes.means
        named["prototypes/counts"] = message.prototypes.counts
    named |= {f"extra/{name}": tensor for name, tensor in message.extra.items()}
    return named | {f"numbers/{k}": torch.tensor(v, dtype=torch.float64) for k, v in message.numbers.items()}


def _write(path: Path, tensors: Tensors, header: Mapping[str, str]) -> None:
    from safetensors.torch import save

    own = {k: t.detach().to("cpu").clone(memory_format=torch.contiguous_format) for k, t in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(own, dict(header)))


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
