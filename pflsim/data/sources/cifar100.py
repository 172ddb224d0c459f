"""CIFAR-100: 50,000 + 10,000 colour images, 32×32, 100 classes in 20 superclasses."""

from __future__ import annotations

from pathlib import Path

from pflsim.data.dataset import Dataset
from pflsim.data.sources.cifar_batches import read_batches
from pflsim.data.sources.common import download as run_download
from pflsim.data.sources.common import finished, has_file, joined, not_found


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
    folder = Path(root) / "cifar-100-python"
    if not all(has_file(folder / part) for part in ("train", "test")):
        if not download:
            raise not_found("cifar100", folder, ["train", "test"])

        def fetch() -> object:
            from torchvision.datasets import CIFAR100

            return CIFAR100(root, download=True)

        run_download("cifar100", fetch, folder)
    key, classes = ("coarse_labels", 20) if coarse else ("fine_labels", 100)
    train, test = (read_batches([folder / part], key, classes) for part in ("train", "test"))
    return finished(joined("cifar100", train, test, classes), standardize)
