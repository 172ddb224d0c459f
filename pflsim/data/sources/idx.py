"""Loads data sets of four IDX files, plain or gzipped: MNIST, Fashion-MNIST and EMNIST."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from pflsim.config.memory import check_room
from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import checked_labels, fetch, joined, reason
from pflsim.errors import SettingsError


def load_idx(
    name: str,
    target: str,
    root: str,
    download: bool,
    stems: tuple[str, str] = ("train", "t10k"),
    num_classes: int = 10,
    first_label: int = 0,
    **options: str,
) -> Dataset:
    """Load the training and test parts from `<stem>-images-idx3-ubyte` and `<stem>-labels-idx1-ubyte` (or .gz).

    Args:
        name: the data set's name.
        target: torchvision's class, which is also its folder in `root`; the files are in `raw` or `raw/gzip` below it.
        root: folder of data sets.
        download: download the files if missing.
        stems: file name prefixes of the training and the test part.
        num_classes: C.
        first_label: label of class 0 in the files.
        options: further arguments of torchvision's class.

    Raises:
        SettingsError: files are missing or invalid, or the download failed.
    """
    folder = Path(root) / target / "raw"
    names = [f"{stem}-{kind}-ubyte" for stem in stems for kind in ("images-idx3", "labels-idx1")]

    def look() -> list[Path]:
        choices = [
            [at / f"{file}{suffix}" for at in (folder, folder / "gzip") for suffix in ("", ".gz")] for file in names
        ]
        return [path for paths in choices if (path := next(filter(Path.is_file, paths), None)) is not None]

    files = look()
    if len(files) < 4:
        fetch(name, target, root, folder, [f"{file}(.gz)" for file in names], download, **options)
        files = look()
    parts = []
    for images, labels in (files[:2], files[2:]):
        x, y = read(images, 3), read(labels, 1)
        parts.append((x[:, None], checked_labels(str(labels), y, len(x), num_classes, first_label)))
    return joined(name, parts[0], parts[1], num_classes)


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
