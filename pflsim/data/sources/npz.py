"""Any data set in a NumPy archive."""

from __future__ import annotations

import lzma
import math
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import MAX_CLASSES, finished, has_file, has_folder, joined, reason
from pflsim.errors import SettingsError
from pflsim.memory import check_room

KEYS = ("x_train", "y_train", "x_test", "y_test")
CHANNELS = (1, 3, 4)
UNREADABLE = (
    OSError, EOFError, ValueError, RuntimeError, LookupError, SyntaxError, MemoryError, ArithmeticError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip
"""Errors of NumPy and zipfile for damaged, encrypted or unsupported archives."""


def load(
    *, path: str | None = None, layout: str = "auto", num_classes: int | None = None, standardize: bool = False
) -> Dataset:
    """Load a .npz file with x_train, y_train, x_test and y_test.

    Args:
        path: the file. x: uint8 (divided by 255) or floating point (used as it is, as float32), shaped [n, H, W],
            [n, H, W, C], [n, C, H, W] or [n, features]. y: integers from 0, [n] or [n, 1].
        layout: layout of 4-D arrays: "hwc", "chw" or "auto", which detects the axis of channels by its length 1, 3 or
            4.
        num_classes: C; None: largest label + 1.
        standardize: standardise each channel with statistics of the training part.

    Returns:
        x [n, channels, height, width] or [n, features]. The name is the file name without ".npz".

    Raises:
        SettingsError: the file does not exist or has invalid arrays.
    """
    if not path:
        raise SettingsError(f"data=npz needs data.path=FILE.npz with the arrays {', '.join(KEYS)}")
    if layout not in ("auto", "hwc", "chw"):
        raise SettingsError(f"data.layout={layout!r} is not one of: auto, hwc, chw")
    if num_classes is not None and not 1 <= num_classes <= MAX_CLASSES:
        raise SettingsError(f"data.num_classes={num_classes}: expected a whole number from 1 to {MAX_CLASSES}")
    arrays = _read(Path(path))
    parts = {}
    for part in ("train", "test"):
        x = _images(path, f"x_{part}", arrays[f"x_{part}"], layout)
        y = _labels(path, f"y_{part}", arrays[f"y_{part}"], num_classes)
        if len(x) != len(y):
            raise SettingsError(f"{path}: x_{part} has {len(x)} rows, y_{part} has {len(y)}; expected equal numbers")
        parts[part] = (x, y)
    (x_train, y_train), (x_test, y_test) = parts["train"], parts["test"]
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
        raise SettingsError(
            f"{path}: x_test has {x_test.dtype} examples of shape {x_test.shape[1:]}, expected {x_train.dtype} of "
            f"{x_train.shape[1:]} as in x_train"
        )
    classes = num_classes or 1 + int(max(y_train.max(), y_test.max()))
    return finished(joined(Path(path).stem, (x_train, y_train), (x_test, y_test), classes), standardize)


def _read(path: Path) -> dict[str, np.ndarray]:
    if has_folder(path, "data.path"):
        raise SettingsError(f"data.path={path} is a folder, expected an .npz file with {', '.join(KEYS)}")
    if not has_file(path, "data.path"):
        raise SettingsError(f"data.path={path}: no such file (looked for {path.absolute()})")
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = [key for key in KEYS if key not in members]
            if missing:
                raise SettingsError(
                    f"{path}: no array {', '.join(missing)}; expected {', '.join(KEYS)}, found "
                    f"{', '.join(members) or 'none'}"
                )
            check_room(f"{path}: {', '.join(KEYS)}", sum(members[key].file_size for key in KEYS), "take fewer examples")
            return {key: _array(path, key, archive, members[key]) for key in KEYS}
    except UNREADABLE as error:
        if isinstance(error, SettingsError):
            raise
        if _is_single_array(path):
            raise SettingsError(
                f"{path} holds a single array, expected an .npz archive with {', '.join(KEYS)}"
            ) from None
        raise SettingsError(
            f"{path} is not a readable .npz archive ({reason(error)}); expected one with {', '.join(KEYS)}"
        ) from error


def _is_single_array(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX
    except OSError:
        return False


def _array(path: Path, key: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Read one array after checking its size, since NumPy allocates memory before it reads."""
    with archive.open(member) as file:
        shape, dtype = _header(path, key, file)
        size = dtype.itemsize * math.prod(shape)
        if member.file_size - file.tell() != size:
            raise SettingsError(
                f"{path}: {key} is damaged: its header says {dtype} {shape}, {size} bytes, but it has "
                f"{member.file_size - file.tell()}"
            )
    with archive.open(member) as file:
        return npy.read_array(file, allow_pickle=False)


def _header(path: Path, key: str, file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    try:
        version = npy.read_magic(file)
        reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = reader(file)
    except ValueError as error:
        raise SettingsError(f"{path}: {key} is not a NumPy array ({reason(error)})") from error
    if dtype.hasobject or dtype.names or dtype.subdtype:  # objects would need pickle; records
        raise SettingsError(f"{path}: {key} is not a plain array; expected numbers, not objects")
    return shape, dtype


def _images(path: str, key: str, x: np.ndarray, layout: str) -> np.ndarray:
    """Check images or features; return them as [n, channels, height, width] or [n, features]."""
    if x.dtype != np.uint8 and not np.issubdtype(x.dtype, np.floating):
        raise SettingsError(f"{path}: {key} is {x.dtype}, expected uint8 (0..255) or floating point")
    if x.ndim not in (2, 3, 4) or 0 in x.shape:
        raise SettingsError(
            f"{path}: {key} has shape {x.shape}, expected [n, H, W], [n, H, W, C], [n, C, H, W] or [n, F]"
        )
    if np.issubdtype(x.dtype, np.floating):
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        bad = int(np.count_nonzero(~np.isfinite(x)))
        if bad:
            raise SettingsError(
                f"{path}: {key} has {bad} values that are NaN, infinite or beyond float32; expected finite numbers"
            )
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and _channels_last(path, key, x, layout):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x


def _channels_last(path: str, key: str, x: np.ndarray, layout: str) -> bool:
    if layout != "auto":
        return layout == "hwc"
    last, first = x.shape[3] in CHANNELS, x.shape[1] in CHANNELS
    if last == first:
        raise SettingsError(
            f"{path}: {key} has shape {x.shape}; the axis of channels (length 1, 3 or 4) is ambiguous; "
            "set data.layout=hwc or data.layout=chw"
        )
    return last


def _labels(path: str, key: str, y: np.ndarray, num_classes: int | None) -> np.ndarray:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or not len(y) or not np.issubdtype(y.dtype, np.integer):
        raise SettingsError(f"{path}: {key} is {y.dtype} {y.shape}, expected integer labels [n]")
    if y.min() < 0 or y.max() >= (num_classes or MAX_CLASSES):
        upto = "" if num_classes is None else f" (data.num_classes={num_classes})"
        raise SettingsError(
            f"{path}: {key} holds labels {y.min()}..{y.max()}, expected 0..{(num_classes or MAX_CLASSES) - 1}{upto}"
        )
    return y.astype(np.int64)
