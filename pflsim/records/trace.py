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

from pflsim.messages import Message
from pflsim.records.files import in_order, write_atomically
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
    write_atomically(path, in_order(save(own, dict(header))))
