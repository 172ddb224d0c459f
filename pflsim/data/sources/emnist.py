"""EMNIST: handwritten letters and digits, 28×28 grey."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import finished
from pflsim.data.sources.mnist_family import load_idx
from pflsim.errors import SettingsError

CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}


def load(*, root: str = "data", download: bool = False, split: str = "balanced", standardize: bool = False) -> Dataset:
    """Load a split of EMNIST (Cohen et al. 2017) from `root`/EMNIST/raw, torchvision's folder.

    Args:
        root: folder of data sets.
        download: download missing files (560 MB) with torchvision.
        split: byclass (62 classes), bymerge (47), balanced (47), letters (26), digits (10) or mnist (10).
        standardize: standardise with statistics of the training part.

    Returns:
        x [n, 1, 28, 28] uint8, upright (the files store transposed images). Labels start at 0, also those of letters.

    Raises:
        SettingsError: the split is unknown, or files are missing or invalid.
    """
    if split not in CLASSES:
        raise SettingsError(f"data.split={split!r} is not one of: {', '.join(CLASSES)}")

    def fetch() -> object:
        from torchvision.datasets import EMNIST

        return EMNIST(root, split=split, download=True)

    dataset = load_idx(
        f"emnist_{split}",
        Path(root) / "EMNIST" / "raw",
        (f"emnist-{split}-train", f"emnist-{split}-test"),
        CLASSES[split],
        fetch if download else None,
        first_label=1 if split == "letters" else 0,
    )
    return finished(dataclasses.replace(dataset, x=dataset.x.transpose(0, 1, 3, 2).copy()), standardize)
