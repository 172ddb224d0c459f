"""The IDX format of the MNIST family, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

import numpy as np

from pflsim.data.sources.common import has_file, reason
from pflsim.errors import SettingsError
from pflsim.memory import check_room


def find(folders: Sequence[Path], name: str) -> Path | None:
    """Return the path of `name` or `name`.gz in the first folder that has it, or None."""
    return next((f for folder in folders for f in (folder / name, folder / f"{name}.gz") if has_file(f)), None)


def read(path: Path, dims: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes.

    Args:
        path: the file; gzipped if its name ends in .gz.
        dims: expected number of axes, 3 for images and 1 for labels.

    Raises:
        SettingsError: the file is damaged or has another format.
    """
    try:
        with cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            shape, body = _read(path, file, dims)
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise SettingsError(f"{path} cannot be read ({reason(error)}); fetch it again") from error
    if len(body) != math.prod(shape):
        held = f"{len(body)} bytes" if len(body) < math.prod(shape) else "more"
        raise SettingsError(
            f"{path} is cut short or overlong: its header says {shape}, but it has {held}; fetch it again"
        )
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def _read(path: Path, file: IO[bytes], dims: int) -> tuple[tuple[int, ...], bytes]:
    """Return the shape in the header, and at most one byte more than it needs: a small .gz may unpack to any size.

    Header: two zero bytes, 8 for unsigned bytes, the number of axes, then each axis as a big-endian 32-bit number.
    """
    header = file.read(4 + 4 * dims)
    if header[:4] != bytes((0, 0, 8, dims)) or len(header) < 4 + 4 * dims:
        raise SettingsError(f"{path} is not an IDX file of unsigned bytes with {dims} axes; fetch it again")
    shape = tuple(int(n) for n in np.frombuffer(header, dtype=">u4", offset=4))
    if not math.prod(shape):
        raise SettingsError(f"{path} is empty: its header says {shape}; fetch it again")
    check_room(
        f"{path}, whose header says {shape},", math.prod(shape), "fetch it again, or use a machine with more memory"
    )
    return shape, file.read(math.prod(shape) + 1)


def read_pair(images: Path, labels: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images [n, 1, h, w] uint8 and labels [n] int64 from their files.

    Raises:
        SettingsError: a file cannot be read, or the numbers of images and labels differ.
    """
    x, y = read(images, 3), read(labels, 1)
    if len(x) != len(y) or not len(y):
        raise SettingsError(f"{images} holds {len(x)} images and {labels} {len(y)} labels; expected equal numbers")
    return x[:, None], y.astype(np.int64)
