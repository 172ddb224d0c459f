"""The diagnostics of a round: matrices such as mixing weights, similarities between clients and confusion matrices.

The server and the hosts compute them in the rounds that request them. `diagnostics.safetensors` in the run folder holds
the most recent ones.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pflsim.errors import SettingsError
from pflsim.records.files import in_order, write_atomically
from pflsim.types import Axis, Matrix

FILE = "diagnostics.safetensors"


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """The matrices of a round."""

    round: int
    matrices: tuple[Matrix, ...]


def write_diagnostics(folder: Path, diagnostics: Diagnostics) -> None:
    """Write diagnostics to a run folder; they replace earlier ones."""
    from safetensors.numpy import save

    header, tensors = {"round": str(diagnostics.round)}, {}
    for number, matrix in enumerate(diagnostics.matrices):
        attributes = asdict(matrix)
        tensors[str(number)] = np.ascontiguousarray(attributes.pop("values"), np.float32)
        header[str(number)] = json.dumps(attributes)
    write_atomically(folder / FILE, in_order(save(tensors, header)))


def read_diagnostics(folder: Path) -> Diagnostics | None:
    """Read the diagnostics in a run folder; None if there are none.

    Raises:
        SettingsError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, "numpy") as file:
            header = file.metadata() or {}
            numbers = map(str, range(len(header) - 1))
            return Diagnostics(int(header["round"]), tuple(_matrix(header[n], file.get_tensor(n)) for n in numbers))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise SettingsError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error


def cut_diagnostics(folder: Path, after: int) -> None:
    """Remove diagnostics of a round later than `after`, and diagnostics that cannot be read."""
    try:
        found = read_diagnostics(folder)
    except SettingsError:
        found = None
    if found is None or found.round > after:
        (folder / FILE).unlink(missing_ok=True)


def _matrix(attributes: str, values: np.ndarray) -> Matrix:
    saved = json.loads(attributes)
    rows, columns = (Axis(saved[side]["label"], tuple(saved[side]["names"])) for side in ("rows", "columns"))
    bounds = saved["bounds"]
    return Matrix(saved["name"], saved["title"], rows, columns, values, (bounds[0], bounds[1]) if bounds else None)
