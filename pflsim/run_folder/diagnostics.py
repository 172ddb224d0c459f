"""Matrices that show a round: who learns from whom, how alike clients are, what is taken for what.

The server and the hosts compute them in the rounds that ask for it. `diagnostics.safetensors` in the run folder holds
the newest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pflsim.errors import SettingsError
from pflsim.run_folder.files import write_atomically
from pflsim.types import Axis, Matrix

FILE = "diagnostics.safetensors"


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """The matrices of a round."""

    round: int
    matrices: tuple[Matrix, ...]


def write_diagnostics(folder: Path, diagnostics: Diagnostics) -> None:
    """Write them into a run folder in place of older ones."""
    from safetensors.numpy import save

    head = {"round": str(diagnostics.round)}
    for number, matrix in enumerate(diagnostics.matrices):
        about = asdict(matrix)
        del about["values"]
        head[str(number)] = json.dumps(about)
    tensors = {str(n): np.ascontiguousarray(m.values, np.float32) for n, m in enumerate(diagnostics.matrices)}
    write_atomically(folder / FILE, save(tensors, head))


def read_diagnostics(folder: Path) -> Diagnostics | None:
    """Read them back; None where a run has none.

    Raises:
        SettingsError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, "numpy") as file:
            head = file.metadata() or {}
            count = len(head) - 1
            return Diagnostics(
                int(head["round"]), tuple(_matrix(head[str(n)], file.get_tensor(str(n))) for n in range(count))
            )
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise SettingsError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error


def cut_diagnostics(folder: Path, after: int) -> None:
    """Remove those of a round later than that one, and what cannot be read; the next ones take their place."""
    try:
        found = read_diagnostics(folder)
    except SettingsError:
        found = None
    if found is None or found.round > after:
        (folder / FILE).unlink(missing_ok=True)


def _matrix(about: str, values: np.ndarray) -> Matrix:
    given = json.loads(about)
    rows, columns = (Axis(given[side]["label"], tuple(given[side]["names"])) for side in ("rows", "columns"))
    bounds: Sequence[float] | None = given["bounds"]
    return Matrix(given["name"], given["title"], rows, columns, values, (bounds[0], bounds[1]) if bounds else None)
