"""FEMNIST by writer, in the JSON format of LEAF (Caldas et al. 2018, arXiv:1812.01097)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from pflsim.data.dataset import Dataset, described
from pflsim.data.sources.common import checked_labels, entries, finished, joined, not_found, reason
from pflsim.errors import SettingsError

CLASSES = 62
PIXELS = 28 * 28


def load(*, root: str = "data", standardize: bool = False) -> Dataset:
    """Load the output of LEAF's preprocessing: train/*.json and test/*.json with `users` and `user_data`.

    Args:
        root: folder of data sets; searches `root`/femnist, `root`/femnist/data and `root`.
        standardize: standardise with statistics of the training part.

    Returns:
        x [n, 1, 28, 28], uint8 if the values are multiples of 1/255 as LEAF writes them (else float32), 62 classes,
        and `writers` [n]: indices of the users sorted by name, shared by both parts.

    Raises:
        SettingsError: files are missing or invalid.

    Notes:
        `preprocess.sh` in LEAF's femnist folder creates the files. With `-t sample`, each writer has examples in both
        parts; with `-t user`, the parts have different writers.
    """
    folders = [Path(root) / "femnist", Path(root) / "femnist" / "data", Path(root)]
    folder = next((p for p in folders if all(_json_files(p / part) for part in ("train", "test"))), None)
    if folder is None:
        raise not_found("femnist", folders[0], ["train/*.json", "test/*.json (LEAF's format)"], can_download=False)
    (users, x, y), (test_users, x_test, y_test) = (_read_part(folder / part) for part in ("train", "test"))
    dataset = joined("femnist", (x, y), (x_test, y_test), CLASSES)
    numbers = {name: i for i, name in enumerate(sorted({*users, *test_users}))}
    writers = np.array([numbers[user] for user in users + test_users], dtype=np.int64)
    dataset = dataclasses.replace(dataset, x=_as_bytes(dataset.x).reshape(-1, 1, 28, 28), writers=writers)
    return finished(dataset, standardize)


def _json_files(folder: Path) -> list[Path]:
    return [path for path in entries(folder) if path.suffix == ".json"] if folder.is_dir() else []


def _read_part(folder: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the writer of each row, x [n, 784] float32 and y [n] of all files of a folder, sorted by file name."""
    users, xs, ys = [], [], []
    for path in _json_files(folder):
        for user, (x, y) in _read_file(path).items():
            users += [user] * len(y)
            xs.append(x)
            ys.append(y)
    if not users:
        raise SettingsError(f"{folder} holds no examples: expected LEAF files with user_data")
    return users, np.concatenate(xs), np.concatenate(ys)


def _read_file(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise SettingsError(f"{path} is not a readable JSON file ({reason(error)})") from error
    try:
        found = {str(user): content["user_data"][user] for user in content["users"]}
    except (LookupError, TypeError) as error:
        raise SettingsError(
            f"{path} is not in LEAF's format ({error!r}): expected users, a list of names, and user_data of each"
        ) from error
    return {user: _examples(f"{path}: user {user!r}", data) for user, data in found.items()}


def _examples(where: str, data: Any) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.errstate(over="ignore"):
            x, y = np.asarray(data["x"], dtype=np.float32), np.asarray(data["y"])
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise SettingsError(f"{where} needs x (lists of {PIXELS} numbers) and y ({reason(error)})") from error
    if y.shape == (0,) and not x.size:
        return np.empty((0, PIXELS), dtype=np.float32), np.empty(0, dtype=np.int64)
    if x.ndim != 2 or x.shape[1] != PIXELS or not np.isfinite(x).all():
        raise SettingsError(f"{where}: x is {described(x)}, expected finite numbers [n, {PIXELS}]")
    return x, checked_labels(f"{where}: y", y, len(x), CLASSES)


def _as_bytes(x: np.ndarray) -> np.ndarray:
    """Store multiples of 1/255 in [0, 1] as uint8, a quarter of the memory; leave anything else as float32."""
    levels = np.rint(x * 255)
    exact = np.abs(x * 255 - levels).max() < 1e-3 and levels.min() >= 0 and levels.max() <= 255
    return levels.astype(np.uint8) if exact else x
