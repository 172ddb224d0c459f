"""CIFAR-10: 50,000 + 10,000 colour images, 32×32."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pflsim.data.dataset import Dataset
from pflsim.data.sources import npz
from pflsim.data.sources.cifar_batches import has_batches, load_batches
from pflsim.data.sources.common import finished


def load(*, root: str = "data", download: bool = False, standardize: bool = False) -> Dataset:
    """Load CIFAR-10 from `root`/cifar-10-batches-py, torchvision's folder, or else from `root`/cifar10.npz.

    Args:
        root: folder of data sets.
        download: download missing files (170 MB) with torchvision.
        standardize: standardise each channel with statistics of the training part.

    Returns:
        x [60000, 3, 32, 32] uint8, 10 classes.

    Raises:
        SettingsError: files are missing or invalid.
    """
    folder, packed = Path(root) / "cifar-10-batches-py", Path(root) / "cifar10.npz"
    parts = [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"]
    if not has_batches(folder, parts) and packed.is_file():
        return dataclasses.replace(npz.load(path=str(packed), num_classes=10, standardize=standardize), name="cifar10")
    expected = ["data_batch_1 to data_batch_5", f"test_batch (or {packed})"]
    return finished(load_batches("cifar10", folder, parts, "labels", 10, download, expected), standardize)
