"""CIFAR-100: 50,000 + 10,000 colour images, 32×32, 100 classes in 20 superclasses."""

from __future__ import annotations

from pathlib import Path

from pflsim.data.dataset import Dataset
from pflsim.data.sources.cifar_batches import load_batches
from pflsim.data.sources.common import finished


def load(*, root: str = "data", download: bool = False, coarse: bool = False, standardize: bool = False) -> Dataset:
    """Load CIFAR-100 from `root`/cifar-100-python, torchvision's folder.

    Args:
        root: folder of data sets.
        download: download missing files (169 MB) with torchvision.
        coarse: use the 20 superclasses instead of the 100 classes.
        standardize: standardise each channel with statistics of the training part.

    Returns:
        x [60000, 3, 32, 32] uint8, 100 classes (or 20).

    Raises:
        SettingsError: files are missing or invalid.
    """
    folder, parts = Path(root) / "cifar-100-python", (["train"], ["test"])
    key, classes = ("coarse_labels", 20) if coarse else ("fine_labels", 100)
    return finished(load_batches("cifar100", folder, parts, key, classes, download, ["train", "test"]), standardize)
