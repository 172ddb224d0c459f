"""Tensors of single rounds as safetensors: the messages of traced rounds, and the matrices of diagnostics.

    trace/round_0001/down_003.safetensors   what client 3 received at the start of round 1
    trace/round_0001/up_003.safetensors     what client 3 sent after training
    trace/round_0001/server.safetensors     what the server rule reports after fusion
    diagnostics.safetensors                 matrices of the last round that computes them, e.g. mixing weights

Tensor names of messages: `weights/<state_dict key>`, `prototypes/means` [C, D] with `prototypes/counts` [C],
`extra/<name>` and `numbers/<name>` (0-d float64). Header, as strings: method, round,
client, and num_examples of replies, and the size in bytes of those that are compressed.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pflsim.errors import reading
from pflsim.messages import Message
from pflsim.records.files import FORM, write_atomically
from pflsim.types import Axis, Matrix, Tensors

DIAGNOSTICS = "diagnostics.safetensors"


def write_trace(
    folder: Path, round_number: int, name: str, content: Message | Tensors, header: Mapping[str, object]
) -> Path:
    """Write a message of a round, or what the server rule reports after its fusion, and return the file.

    Args:
        folder: the run folder.
        round_number: the round; it is added to the header.
        name: of the file, without its ending.
        content: a message, or tensors by name, e.g. `zeta/<unit>` [N, N]. Tensors may be views or share memory.
        header: of the file.
    """
    tensors = tensors_of(content) if isinstance(content, Message) else content
    if isinstance(content, Message) and content.size is not None:
        header = {**header, "size": content.size}
    path = folder / "trace" / f"round_{round_number:04d}" / f"{name}.safetensors"
    write_tensors(path, tensors, {key: str(value) for key, value in {"round": round_number, **header}.items()})
    return path


def tensors_of(message: Message) -> dict[str, Tensor]:
    """Return all tensors of a message, and its numbers as tensors, by their names in a trace."""
    prototypes = {name: getattr(message.prototypes, name) for name in ("means", "counts") if message.prototypes}
    numbers = {name: torch.tensor(x, dtype=torch.float64) for name, x in message.numbers.items()}
    parts = {"weights": message.weights, "prototypes": prototypes, "extra": message.extra, "numbers": numbers}
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


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


def named(matrix: Matrix, names: tuple[str, ...]) -> Matrix:
    """Return a matrix with the names of the clients, if they have names, at rows and columns that are clients."""

    def axis(given: Axis, size: int) -> Axis:
        return replace(given, names=names[:size]) if given.label in ("client", "receiver", "sender") else given

    rows, columns = matrix.values.shape
    return replace(matrix, rows=axis(matrix.rows, rows), columns=axis(matrix.columns, columns))


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
    from safetensors import safe_open

    path = folder / DIAGNOSTICS
    if not path.is_file():
        return None
    with reading(path, FORM), safe_open(path, "numpy") as file:
        header = file.metadata() or {}
        numbers = map(str, range(len(header) - 1))
        return RoundMatrices(int(header["round"]), tuple(_matrix(header[n], file.get_tensor(n)) for n in numbers))


def _matrix(attributes: str, values: np.ndarray) -> Matrix:
    saved = json.loads(attributes)
    rows, columns = (Axis(saved[side]["label"], tuple(saved[side]["names"])) for side in ("rows", "columns"))
    return Matrix(saved["name"], saved["title"], rows, columns, values, saved["bounds"] and tuple(saved["bounds"]))
