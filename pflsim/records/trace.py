"""Tensors of single rounds as safetensors: the messages of traced rounds, and the matrices of diagnostics.

    trace/round_0001/down_003.safetensors   what client 3 received at the start of round 1
    trace/round_0001/up_003.safetensors     what client 3 sent after training
    trace/round_0001/server.safetensors     what the server rule reports after fusion
    diagnostics.safetensors                 matrices of the last round that computes them, e.g. mixing weights

Tensor names of messages: `weights/<state_dict key>`, `prototypes/means` [C, D] with `prototypes/counts` [C],
`extra/<name>` and `numbers/<name>` (0-d float64). Header: method, round, client, num_examples, as strings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from pflsim.errors import SettingsError
from pflsim.messages import Message
from pflsim.records.files import write_atomically
from pflsim.types import Axis, Matrix, Tensors

DIAGNOSTICS = "diagnostics.safetensors"


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
    tensors = {f"weights/{name}": tensor for name, tensor in message.weights.items()}
    if message.prototypes is not None:
        tensors |= {f"prototypes/{name}": getattr(message.prototypes, name) for name in ("means", "counts")}
    tensors |= {f"extra/{name}": tensor for name, tensor in message.extra.items()}
    tensors |= {f"numbers/{name}": torch.tensor(x, dtype=torch.float64) for name, x in message.numbers.items()}
    header = {"method": method, "client": str(client), "num_examples": str(num_examples)}
    return _write(folder, round_number, f"{direction}_{client:03d}", tensors, header)


def write_server(folder: Path, round_number: int, tensors: Tensors, metadata: Mapping[str, str]) -> Path:
    """Write what the server rule reports after a round's fusion, e.g. `zeta/<unit>` [N, N].

    Args:
        folder: the run folder.
        round_number: the round, from 1.
        tensors: tensors by name.
        metadata: texts for the header, e.g. the names of the units. The round is added.
    """
    return _write(folder, round_number, "server", tensors, metadata)


def _write(folder: Path, round_number: int, name: str, tensors: Tensors, header: Mapping[str, str]) -> Path:
    path = folder / "trace" / f"round_{round_number:04d}" / f"{name}.safetensors"
    write_tensors(path, tensors, {"round": str(round_number), **header})
    return path


def write_tensors(path: Path, tensors: Tensors, header: Mapping[str, str]) -> None:
    """Write a safetensors file atomically."""
    from safetensors.torch import save

    own = {k: t.detach().to("cpu").clone(memory_format=torch.contiguous_format) for k, t in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(own, dict(header)))


@dataclass(frozen=True, slots=True)
class RoundMatrices:
    """The matrices of a round, such as mixing weights, similarities between clients and confusion matrices."""

    round: int
    matrices: tuple[Matrix, ...]


def write_matrices(folder: Path, found: RoundMatrices) -> None:
    """Write the matrices of a round to a run folder; they replace earlier ones."""
    header, tensors = {"round": str(found.round)}, {}
    for number, matrix in enumerate(found.matrices):
        attributes = asdict(matrix)
        tensors[str(number)] = torch.from_numpy(np.array(attributes.pop("values"), np.float32))
        header[str(number)] = json.dumps(attributes)
    write_tensors(folder / DIAGNOSTICS, tensors, header)


def read_matrices(folder: Path) -> RoundMatrices | None:
    """Read the matrices in a run folder; None if there are none.

    Raises:
        SettingsError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / DIAGNOSTICS
    if not path.is_file():
        return None
    try:
        with safe_open(path, "numpy") as file:
            header = file.metadata() or {}
            numbers = map(str, range(len(header) - 1))
            return RoundMatrices(int(header["round"]), tuple(_matrix(header[n], file.get_tensor(n)) for n in numbers))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise SettingsError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error


def _matrix(attributes: str, values: np.ndarray) -> Matrix:
    saved = json.loads(attributes)
    rows, columns = (Axis(saved[side]["label"], tuple(saved[side]["names"])) for side in ("rows", "columns"))
    return Matrix(saved["name"], saved["title"], rows, columns, values, saved["bounds"] and tuple(saved["bounds"]))
