"""EMNIST: handwritten letters and digits, 28×28 grey."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import finished
from pflsim.data.sources.idx import load_idx

Part = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]
CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}


def load(*, root: str = "data", download: bool = False, split: Part = "balanced", standardize: bool = False) -> Dataset:
    """Load a split of EMNIST (Cohen et al. 2017) from `root`/EMNIST/raw, torchvision's folder.

    Args:
        root: folder of data sets.
        download: download missing files (560 MB) with torchvision.
        split: byclass (62 classes), bymerge (47), balanced (47), letters (26), digits (10) or mnist (10).
        standardize: standardise with statistics of the training part.

    Returns:
        x [n, 1, 28, 28] uint8, upright (the files store transposed images). Labels start at 0, also those of letters.

    Raises:
        SettingsError: files are missing or invalid.
    """
    stems, first_label = (f"emnist-{split}-train", f"emnist-{split}-test"), int(split == "letters")
    dataset = load_idx(f"emnist_{split}", "EMNIST", root, download, stems, CLASSES[split], first_label, split=split)
    return finished(dataclasses.replace(dataset, x=dataset.x.transpose(0, 1, 3, 2).copy()), standardize)
