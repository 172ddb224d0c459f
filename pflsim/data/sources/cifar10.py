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
    """Load CIFAR-10 from `root`/cifar-10-batches-py, where torchvision keeps it, or else from `root`/cifar10.npz.

    Args:
        root: folder of data sets.
        download: fetch it with torchvision when it is not there (170 MB).
        standardize: subtract the mean and divide by the deviation of each colour over the training part.

    Returns:
        x [60000, 3, 32, 32] uint8, 10 classes.

    Raises:
        SettingsError: not there, or not readable; says where to put which files.
    """
    folder = Path(root) / "cifar-10-batches-py"
    train, test = [folder / f"data_batch_{i}" for i in range(1, 6)], [folder / "test_batch"]
    packed = Path(root) / "cifar10.npz"
    there = all(has_file(f) for f in train + test)
    if not there and has_file(packed):
        return dataclasses.replace(npz.load(path=str(packed), num_classes=10, standardize=standardize), name="cifar10")
    if not there and download:

        def fetch() -> object:
            from torchvision.datasets import CIFAR10

            return CIFAR10(root, download=True)

        run_download("cifar10", fetch, folder)
    elif not there:
        raise not_found("cifar10", folder, ["data_batch_1 to data_batch_5", f"test_batch (or {packed})"])
    parts = read_batches(train, "labels", 10), read_batches(test, "labels", 10)
    return finished(joined("cifar10", *parts, 10), standardize)
