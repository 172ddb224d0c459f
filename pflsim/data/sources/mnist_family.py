"""Loads data sets of four IDX files: MNIST, Fashion-MNIST and EMNIST."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.sources import idx
from pflsim.data.sources.common import check_together, download, joined, not_found
from pflsim.errors import SettingsError


def load_idx(
    name: str,
    folder: Path,
    stems: tuple[str, str],
    num_classes: int,
    fetch: Callable[[], object] | None,
    first_label: int = 0,
) -> Dataset:
    """Load the training and test parts from `<stem>-images-idx3-ubyte` and `<stem>-labels-idx1-ubyte` (or .gz).

    Args:
        name: the data set's name.
        folder: folder of the files and of downloads.
        stems: file name prefixes of the training and the test part.
        num_classes: C.
        fetch: downloads the files if missing; None: no download.
        first_label: label of class 0 in the files.

    Raises:
        SettingsError: files are missing or invalid, or the download failed.
    """
    names = [f"{stem}-{kind}-ubyte" for stem in stems for kind in ("images-idx3", "labels-idx1")]

    def look() -> list[Path]:
        return [path for file in names if (path := idx.find((folder, folder / "gzip"), file)) is not None]

    files = look()
    if len(files) < 4 and fetch is not None:
        download(name, fetch, folder)
        files = look()
    if len(files) < 4:
        raise not_found(name, folder, [f"{file}(.gz)" for file in names])
    parts = []
    for images, labels in (files[:2], files[2:]):
        x, y = idx.read_pair(images, labels)
        _check_labels(labels, y - first_label, num_classes, first_label)
        parts.append((x, y - first_label))
    check_together(files[0], parts[0][0], files[2], parts[1][0])
    return joined(name, parts[0], parts[1], num_classes)


def _check_labels(path: Path, y: np.ndarray, num_classes: int, first_label: int) -> None:
    if y.min() < 0 or y.max() >= num_classes:
        raise SettingsError(
            f"{path} holds labels {y.min() + first_label}..{y.max() + first_label}, expected "
            f"{first_label}..{num_classes - 1 + first_label}"
        )
