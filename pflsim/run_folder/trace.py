"""Messages of traced rounds as safetensors, so that anyone can check the fusion with numpy.

    trace/round_0001/down_003.safetensors   what client 3 received at the start of round 1
    trace/round_0001/up_003.safetensors     what it sent at the end
    trace/round_0001/server.safetensors     the server rule's own numbers after that round's fusion

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
    """Where the messages of a round are, below the run folder."""
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
        client: whose message it is.
        message: the message; it is copied, so views and shared tensors are fine.
        method: the method's name, for the header.
        num_examples: the client's training examples, for the header.

    Returns:
        The file.
    """
    header = {"method": method, "round": str(round_number), "client": str(client), "num_examples": str(num_examples)}
    path = trace_folder(folder, round_number) / f"{direction}_{client:03d}.safetensors"
    _write(path, _flatten(message), header)
    return path


def write_server(folder: Path, round_number: int, tensors: Tensors, metadata: Mapping[str, str]) -> Path:
    """Write the server rule's own numbers after a round's fusion, e.g. `zeta/<unit>` [N, N].

    Args:
        folder: the run folder.
        round_number: the round, from 1.
        tensors: the numbers by name.
        metadata: texts for the header, e.g. the names of the units; the round is added.
    """
    path = trace_folder(folder, round_number) / "server.safetensors"
    _write(path, tensors, {"round": str(round_number), **metadata})
    return path


def read_message(path: Path) -> Message | Uplink:
    """Read a message back: an `Uplink` from a file named up_…, else a `Message`."""
    tensors, header = _read(path)
    parts: dict[str, dict[str, Tensor]] = {"weights": {}, "prototypes": {}, "extra": {}, "numbers": {}}
    for name, tensor in tensors.items():
        section, _, key = name.partition("/")
        if section not in parts:
            raise ValueError(f"{path}: the tensor {name!r} is in none of the sections {', '.join(parts)}")
        parts[section][key] = tensor
    pair = parts["prototypes"]
    prototypes = Prototypes(pair["means"], pair["counts"]) if pair else None
    numbers = {name: float(value) for name, value in parts["numbers"].items()}
    if not path.name.startswith("up_"):
        return Message(parts["weights"], prototypes, parts["extra"], numbers)
    client, num_examples = int(header["client"]), int(header["num_examples"])
    return Uplink(parts["weights"], prototypes, parts["extra"], numbers, client, num_examples)


def read_server(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the server's numbers and the header's texts."""
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
