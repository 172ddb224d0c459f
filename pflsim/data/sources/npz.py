"""Any data set in a NumPy archive."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.lib import format as npy

from pflsim.config.validate import Bounds, check_room
from pflsim.data.dataset import Dataset, described
from pflsim.data.sources.common import MAX_CLASSES, checked_labels, finished, joined, reason
from pflsim.errors import SettingsError

KEYS = ("x_train", "y_train", "x_test", "y_test")
CHANNELS = (1, 3, 4)
MAX_TOKENS = 10_000_000
"""Limit on the vocabulary, to detect invalid files."""
Layout = Literal["auto", "hwc", "chw"]


def load(
    *,
    path: str | None = None,
    layout: Layout = "auto",
    num_classes: int | None = None,
    vocabulary: int | None = None,
    standardize: bool = False,
) -> Dataset:
    """Load a .npz file with x_train, y_train, x_test and y_test.

    Args:
        path: the file. x: uint8 (divided by 255) or floating point (used as it is, as float32), shaped [n, H, W],
            [n, H, W, C], [n, C, H, W] or [n, features]; or other integers from 0: token sequences [n, length], in
            which 0 is padding. y: integers from 0, [n] or [n, 1].
        layout: layout of 4-D arrays: "hwc", "chw" or "auto", which detects the axis of channels by its length 1, 3 or
            4.
        num_classes: C; None: largest label + 1.
        vocabulary: of token sequences: the number of different tokens; None: largest token + 1.
        standardize: standardise each channel (or feature) with statistics of the training part.

    Returns:
        x [n, channels, height, width], [n, features] or [n, length]. The name is the file name without ".npz".

    Raises:
        SettingsError: the file does not exist or has invalid arrays.
    """
    if not path:
        raise SettingsError(f"data=npz needs data.path=FILE.npz with the arrays {', '.join(KEYS)}")
    if num_classes is not None:
        Bounds(1, MAX_CLASSES)("data.num_classes", num_classes)
    arrays = _read(Path(path))
    parts = []
    for part in ("train", "test"):
        x = inputs(f"{path}: x_{part}", arrays[f"x_{part}"], layout)
        y = arrays[f"y_{part}"]
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        parts.append((x, checked_labels(f"{path}: y_{part}", y, len(x), num_classes or MAX_CLASSES)))
    classes = num_classes or 1 + max(int(y.max()) for _, y in parts)
    dataset = joined(Path(path).stem, parts[0], parts[1], classes)
    if vocabulary is not None:
        _check_vocabulary(dataset, vocabulary)
    return finished(replace(dataset, vocabulary=vocabulary), standardize)


def _check_vocabulary(dataset: Dataset, vocabulary: int) -> None:
    if dataset.tokens is None:
        raise SettingsError(f"data.vocabulary={vocabulary}: {dataset.name} has {dataset.kind}; leave it out")
    Bounds(dataset.tokens, MAX_TOKENS)("data.vocabulary", vocabulary)


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise SettingsError(
            f"data.path={path} is no file (looked for {path.absolute()}); expected an .npz file with {', '.join(KEYS)}"
        )
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
            return {key: _array(f"{path}: {key}", archive, members[key]) for key in KEYS}
    except SettingsError:
        raise
    except Exception as error:  # zipfile raises various errors for damaged, encrypted or unsupported archives
        raise SettingsError(
            f"{path} is not a readable .npz archive ({reason(error)}); expected one with {', '.join(KEYS)}"
        ) from error


def _array(where: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    try:
        with archive.open(member) as file:
            return npy.read_array(file, allow_pickle=False)
    except Exception as error:  # NumPy raises various errors for invalid bytes
        raise SettingsError(f"{where} is not a readable array of numbers ({reason(error)})") from error


def inputs(where: str, x: np.ndarray, layout: Layout) -> np.ndarray:
    """Check inputs; return them as [n, channels, height, width], [n, features] or int64 [n, length]."""
    if x.dtype != np.uint8 and np.issubdtype(x.dtype, np.integer):
        return _tokens(where, x)
    if x.dtype != np.uint8 and not np.issubdtype(x.dtype, np.floating):
        raise SettingsError(f"{where} is {described(x)}, expected uint8 (0..255), floating point or tokens")
    if x.ndim not in (2, 3, 4) or 0 in x.shape:
        raise SettingsError(f"{where} is {described(x)}, expected [n, H, W], [n, H, W, C], [n, C, H, W] or [n, F]")
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise SettingsError(f"{where} has values that are NaN, infinite or beyond float32; expected finite numbers")
    if x.ndim == 4:
        first, last = x.shape[1] in CHANNELS, x.shape[3] in CHANNELS
        if layout == "auto" and first == last:
            raise SettingsError(
                f"{where} is {described(x)}; the axis of channels (length 1, 3 or 4) is ambiguous; "
                "set data.layout=hwc or data.layout=chw"
            )
        if layout == "hwc" or (layout == "auto" and last):
            x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x[:, None] if x.ndim == 3 else x


def _tokens(where: str, x: np.ndarray) -> np.ndarray:
    """Check token sequences; return them as int64."""
    if x.ndim != 2 or 0 in x.shape:
        raise SettingsError(f"{where} is {described(x)}, expected uint8 or floating point, or tokens [n, length]")
    if x.min() < 0 or x.max() >= MAX_TOKENS:
        raise SettingsError(
            f"{where} has values {x.min()}..{x.max()}, but tokens are 0..{MAX_TOKENS - 1}; store a table as float32"
        )
    return x.astype(np.int64)
