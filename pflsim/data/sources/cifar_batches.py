"""Reads CIFAR batch files: pickled dictionaries with rows of 3,072 bytes."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pflsim.data.sources.common import reason
from pflsim.errors import SettingsError

# Functions that unpickling NumPy arrays requires.
ALLOWED = {
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}
BROKEN = (
    OSError, EOFError, pickle.UnpicklingError, LookupError, TypeError, ValueError, AttributeError, ImportError,
    ArithmeticError, MemoryError, RecursionError, AssertionError, struct.error,
)  # fmt: skip
"""Errors of the unpickler for invalid bytes."""


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


def read_batches(files: Sequence[Path], label_key: str, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read images [n, 3, 32, 32] uint8 and labels [n] int64 from batch files.

    Args:
        files: in order.
        label_key: "labels" (CIFAR-10), "fine_labels" or "coarse_labels" (CIFAR-100).
        num_classes: C.

    Raises:
        SettingsError: a file is not a CIFAR batch.
    """
    xs, ys = [], []
    for path in files:
        x, y = _read(path, label_key)
        if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != 3072 or len(x) != len(y) or not len(y):
            raise SettingsError(f"{path}: 'data' is {x.dtype} {x.shape} with {len(y)} labels, expected uint8 [n, 3072]")
        if y.min() < 0 or y.max() >= num_classes:
            raise SettingsError(f"{path}: labels {y.min()}..{y.max()} in {label_key!r}, expected 0..{num_classes - 1}")
        xs.append(x.reshape(-1, 3, 32, 32))
        ys.append(y)
    return np.concatenate(xs), np.concatenate(ys)


def _read(path: Path, label_key: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="latin1").load()
        data, labels = batch["data"], batch[label_key]
    except BROKEN as error:
        raise SettingsError(
            f"{path} is not a CIFAR batch with 'data' and {label_key!r} ({reason(error)}); fetch it again"
        ) from error
    if not isinstance(data, np.ndarray):
        raise SettingsError(f"{path}: 'data' is a {type(data).__name__}, expected an array of uint8 [n, 3072]")
    if isinstance(labels, np.ndarray) and labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
        return data, labels.astype(np.int64)
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**63 for label in labels):
        raise SettingsError(f"{path}: {label_key!r} is not a list of integers")
    return data, np.array(labels, dtype=np.int64)
