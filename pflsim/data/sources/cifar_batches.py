"""Loads CIFAR batch files: pickled dictionaries with rows of 3,072 bytes."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pflsim.data.dataset import Dataset, described
from pflsim.data.sources.common import checked_labels, fetch, joined, reason
from pflsim.errors import SettingsError

# Functions that unpickling NumPy arrays requires.
ALLOWED = {
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


def _latin1(text: str, encoding: str) -> bytes:
    """Replace `_codecs.encode` for latin1, which Python 3 uses to pickle bytes for Python 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """Unpickles dictionaries, lists, strings, numbers and arrays only, so that data files cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core.", "numpy._core.")  # the original files were written by NumPy 1
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def has_batches(folder: Path, parts: tuple[Sequence[str], Sequence[str]]) -> bool:
    """Return whether a folder has all files of the training and the test part."""
    return all((folder / file).is_file() for files in parts for file in files)


def load_batches(
    name: str,
    folder: Path,
    parts: tuple[Sequence[str], Sequence[str]],
    label_key: str,
    num_classes: int,
    download: bool,
    expected: Sequence[str],
) -> Dataset:
    """Load images [n, 3, 32, 32] uint8 and labels from batch files.

    Args:
        name: the data set's name; in capitals, torchvision's class.
        folder: of the files, in torchvision's folder of data sets.
        parts: the files of the training and of the test part, in order.
        label_key: "labels" (CIFAR-10), "fine_labels" or "coarse_labels" (CIFAR-100).
        num_classes: C.
        download: download the files if missing.
        expected: the files, for the message if they are missing.

    Raises:
        SettingsError: files are missing or invalid, or the download failed.
    """
    if not has_batches(folder, parts):
        fetch(name, name.upper(), str(folder.parent), folder, expected, download)
    train, test = ([_read(folder / file, label_key, num_classes) for file in files] for files in parts)
    return joined(name, _concatenated(train), _concatenated(test), num_classes)


def _concatenated(batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])


def _read(path: Path, label_key: str, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="latin1").load()
        x, y = np.asarray(batch["data"]), np.asarray(batch[label_key])
    except Exception as error:  # the unpickler raises various errors for invalid bytes
        raise SettingsError(
            f"{path} is not a CIFAR batch with 'data' and {label_key!r} ({reason(error)}); fetch it again"
        ) from error
    if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != 3072:
        raise SettingsError(f"{path}: 'data' is {described(x)}, expected uint8 [n, 3072]")
    return x.reshape(-1, 3, 32, 32), checked_labels(f"{path}: {label_key!r}", y, len(x), num_classes)
