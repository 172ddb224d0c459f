"""FEMNIST by writer, in the JSON format of LEAF (Caldas et al. 2018, arXiv:1812.01097)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import entries, finished, has_folder, joined, not_found, reason
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
    parts = {part: _read_part(folder / part) for part in ("train", "test")}
    numbers = {name: i for i, name in enumerate(sorted({u for users, _, _ in parts.values() for u in users}))}
    writers = np.array([numbers[u] for users, _, _ in parts.values() for u in users], dtype=np.int64)
    (_, x_train, y_train), (_, x_test, y_test) = parts["train"], parts["test"]
    dataset = joined("femnist", (x_train, y_train), (x_test, y_test), CLASSES)
    dataset = dataclasses.replace(dataset, x=_as_bytes(dataset.x).reshape(-1, 1, 28, 28), writers=writers)
    return finished(dataset, standardize)


def _json_files(folder: Path) -> list[Path]:
    return [path for path in entries(folder) if path.suffix == ".json"] if has_folder(folder) else []


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


def _read_file(path: Path) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise SettingsError(f"{path} is not a readable JSON file ({reason(error)})") from error
    if not isinstance(content, dict) or not {"users", "user_data"} <= content.keys():
        raise SettingsError(f"{path} is not in LEAF's format: expected the keys users and user_data")
    users, data = content["users"], content["user_data"]
    if not isinstance(users, list) or not all(isinstance(user, str) for user in users) or not isinstance(data, dict):
        raise SettingsError(f"{path} is not in LEAF's format: expected users as a list of names, user_data by name")
    missing = [user for user in users if user not in data]
    if missing:
        raise SettingsError(f"{path}: user {missing[0]!r} is listed in users, but not in user_data")
    return {user: _examples(path, user, data[user]) for user in users}


def _examples(path: Path, user: str, data: Any) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.errstate(over="ignore"):
            x, y = np.asarray(data["x"], dtype=np.float32), np.asarray(data["y"])
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise SettingsError(
            f"{path}: user_data of {user!r} needs x (lists of {PIXELS} numbers) and y ({reason(error)})"
        ) from error
    if y.shape == (0,) and not x.size:
        return np.empty((0, PIXELS), dtype=np.float32), np.empty(0, dtype=np.int64)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise SettingsError(
            f"{path}: y of user {user!r} is {y.dtype} {list(y.shape)}, expected a list of integers 0..61"
        )
    if x.shape != (len(y), PIXELS) or not np.isfinite(x).all():
        raise SettingsError(
            f"{path}: x of user {user!r} has shape {x.shape}, expected finite numbers [{len(y)}, {PIXELS}] for "
            f"its {len(y)} labels"
        )
    if y.min() < 0 or y.max() >= CLASSES:
        raise SettingsError(f"{path}: y of user {user!r} is {y.dtype} {y.min()}..{y.max()}, expected integers 0..61")
    return x, y.astype(np.int64)


def _as_bytes(x: np.ndarray) -> np.ndarray:
    """Store multiples of 1/255 in [0, 1] as uint8, a quarter of the memory; leave anything else as float32."""
    levels = np.rint(x * 255)
    exact = np.abs(x * 255 - levels).max() < 1e-3 and levels.min() >= 0 and levels.max() <= 255
    return levels.astype(np.uint8) if exact else x
