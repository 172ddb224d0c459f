"""CIFAR-10: 50,000 + 10,000 colour images, 32×32."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pflsim.data.dataset import Dataset
from pflsim.data.sources import npz
from pflsim.data.sources.cifar_batches import read_batches
from pflsim.data.sources.common import download as run_download
from pflsim.data.sources.common import finished, has_file, joined, not_found


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
    folder = Path(root) / "cifar-10-batches-py"
    train, test = [folder / f"data_batch_{i}" for i in range(1, 6)], [folder / "test_batch"]
    packed = Path(root) / "cifar10.npz"
    complete = all(has_file(f) for f in train + test)
    if not complete and has_file(packed):
        return dataclasses.replace(npz.load(path=str(packed), num_classes=10, standardize=standardize), name="cifar10")
    if not complete and download:

        def fetch() -> object:
            from torchvision.datasets import CIFAR10

            return CIFAR10(root, download=True)

        run_download("cifar10", fetch, folder)
    elif not complete:
        raise not_found("cifar10", folder, ["data_batch_1 to data_batch_5", f"test_batch (or {packed})"])
    parts = read_batches(train, "labels", 10), read_batches(test, "labels", 10)
    return finished(joined("cifar10", *parts, 10), standardize)
