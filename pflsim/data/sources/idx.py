"""The IDX format of the MNIST family, plain or gzipped."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pflsim.errors import SettingsError


def find(folders: Sequence[Path], name: str) -> Path | None:
    """The file `name` or `name`.gz in the first of the folders that has it, or None."""
    return next((f for folder in folders for f in (folder / name, folder / f"{name}.gz") if f.is_file()), None)


def read(path: Path, dims: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes.

    Args:
        path: the file; gzipped if its name ends in .gz.
        dims: how many axes it must have, 3 for images and 1 for labels.

    Raises:
        SettingsError: not such a file, or cut short; names the file.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise SettingsError(f"{path} cannot be read ({error}); fetch it again") from error
    # Header: two zero bytes, 8 for unsigned bytes, the number of axes, then each axis as a big-endian 32-bit number.
    if raw[:4] != bytes((0, 0, 8, dims)) or len(raw) < 4 + 4 * dims:
        raise SettingsError(f"{path} is not an IDX file of unsigned bytes with {dims} axes; fetch it again")
    shape = tuple(int(n) for n in np.frombuffer(raw, dtype=">u4", count=dims, offset=4))
    body = np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * dims)
    if len(body) != int(np.prod(shape)):
        raise SettingsError(f"{path} is cut short: its header says {shape}, it holds {len(body)} bytes; fetch it again")
    return body.reshape(shape)


def read_pair(images: Path, labels: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 1, h, w] uint8 and labels [n] int64 from their two files.

    Raises:
        SettingsError: unreadable, or different numbers of images and labels.
    """
    x, y = read(images, 3), read(labels, 1)
    if len(x) != len(y) or not len(y):
        raise SettingsError(f"{images} holds {len(x)} images and {labels} {len(y)} labels: they do not belong together")
    return x[:, None], y.astype(np.int64)
