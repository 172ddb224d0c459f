"""FEMNIST by writer, in the JSON format of LEAF (Caldas et al. 2018, arXiv:1812.01097)."""

import dataclasses
import json
from pathlib import Path

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import entries, finished, joined
from pflsim.errors import SettingsError, reading

CLASSES = 62
PIXELS = 28 * 28
FORM = "LEAF's format: users, a list of names, and user_data of each: x, lists of 784 numbers, and y, their labels"


def load(*, root: str = "data", standardize: bool = False) -> Dataset:
    """Load the output of LEAF's preprocessing: train/*.json and test/*.json with `users` and `user_data`.

    Args:
        root: folder of data sets; searches `root`/femnist, `root`/femnist/data and `root`.
        standardize: standardise with statistics of the training part.

    Returns:
        x [n, 1, 28, 28], uint8 if the values are multiples of 1/255 as LEAF writes them (else float32), 62 classes,
        and `clients` [n]: indices of the users sorted by name, shared by both parts.

    Raises:
        SettingsError: files are missing or invalid.

    Notes:
        `preprocess.sh` in LEAF's femnist folder creates the files. With `-t sample`, each writer has examples in both
        parts; with `-t user`, the parts have different writers.
    """
    folders = [Path(root) / "femnist", Path(root) / "femnist" / "data", Path(root)]
    folder = next((p for p in folders if all(_json_files(p / part) for part in ("train", "test"))), None)
    if folder is None:
        expected = "expected train/*.json and test/*.json, in LEAF's format; set data.root=DIR to their folder"
        raise SettingsError(f"femnist was not found in {folders[0].absolute()}: {expected}")
    (users, x, y), (test_users, x_test, y_test) = (_read_part(folder / part) for part in ("train", "test"))
    dataset = joined("femnist", [(x, y), (x_test, y_test)], CLASSES)
    numbers = {name: i for i, name in enumerate(sorted({*users, *test_users}))}
    clients = np.array([numbers[user] for user in users + test_users], dtype=np.int64)
    x, names = _as_bytes(dataset.x).reshape(-1, 1, 28, 28), tuple(numbers)
    dataset = dataclasses.replace(dataset, x=x, clients=clients, client_names=names)
    return finished(dataset, standardize)


def _json_files(folder: Path) -> list[Path]:
    return [path for path in entries(folder) if path.suffix == ".json"] if folder.is_dir() else []


def _read_part(folder: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the writer of each row, x [n, 784] float32 and y [n] of all files of a folder, sorted by file name."""
    users, xs, ys = [], [np.empty((0, PIXELS), np.float32)], [np.empty(0, np.int64)]
    for path in _json_files(folder):
        with reading(path, FORM), np.errstate(over="ignore"):
            content = json.loads(path.read_text(encoding="utf-8"))
            for user in content["users"]:
                data = content["user_data"][user]
                x, y = np.asarray(data["x"], np.float32).reshape(-1, PIXELS), np.asarray(data["y"]).reshape(-1)
                if len(x) != len(y):
                    raise ValueError(f"user {user!r} has {len(x)} examples and {len(y)} labels")
                if len(x):
                    users += [str(user)] * len(x)
                    xs.append(x)
                    ys.append(y)
    return users, np.concatenate(xs), np.concatenate(ys)


def _as_bytes(x: np.ndarray) -> np.ndarray:
    """Store multiples of 1/255 in [0, 1] as uint8, a quarter of the memory; leave anything else as float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        levels = np.rint(x * 255)
        exact = np.abs(x * 255 - levels).max(initial=0) < 1e-3 and levels.min(initial=0) >= 0
        return levels.astype(np.uint8) if exact and levels.max(initial=0) <= 255 else x
