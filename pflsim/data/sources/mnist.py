"""MNIST: 60,000 + 10,000 handwritten digits, 28×28 grey."""

from __future__ import annotations

from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import finished
from pflsim.data.sources.idx import load_idx


def load(*, root: str = "data", download: bool = False, standardize: bool = False) -> Dataset:
    """Load MNIST from `root`/MNIST/raw (plain or .gz files), torchvision's folder.

    Args:
        root: folder of data sets.
        download: download missing files with torchvision.
        standardize: standardise with statistics of the training part.

    Returns:
        x [70000, 1, 28, 28] uint8, 10 classes.

    Raises:
        SettingsError: files are missing or invalid.
    """
    return finished(load_idx("mnist", "MNIST", root, download), standardize)
