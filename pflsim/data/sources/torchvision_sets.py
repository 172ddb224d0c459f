"""MNIST, Fashion-MNIST, EMNIST, USPS, SVHN, CIFAR-10 and CIFAR-100, which torchvision reads and downloads."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.sources import npz
from pflsim.data.sources.common import Standardize, finished, joined
from pflsim.errors import reading

EMNIST_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
EmnistSplit = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]


def mnist(*, root: str = "data", download: bool = False, standardize: Standardize = False) -> Dataset:
    """Load MNIST, 60,000 + 10,000 handwritten digits, from `root`/MNIST/raw, torchvision's folder.

    Args:
        root: folder of data sets.
        download: download missing files with torchvision.
        standardize: standardise each channel with statistics of the training part, or each pixel: per_pixel.

    Returns:
        x [70000, 1, 28, 28] uint8, 10 classes.
    """
    return finished(_load("mnist", "MNIST", root, _idx("MNIST"), 10, download), standardize)


def fashion_mnist(*, root: str = "data", download: bool = False, standardize: Standardize = False) -> Dataset:
    """Load Fashion-MNIST, 60,000 + 10,000 pictures of clothes, from `root`/FashionMNIST/raw, torchvision's folder.

    Args:
        root: folder of data sets.
        download: download missing files with torchvision.
        standardize: standardise each channel with statistics of the training part, or each pixel: per_pixel.

    Returns:
        x [70000, 1, 28, 28] uint8, 10 classes.
    """
    dataset = _load("fashion_mnist", "FashionMNIST", root, _idx("FashionMNIST"), 10, download)
    return finished(dataset, standardize)


def emnist(
    *, root: str = "data", download: bool = False, split: EmnistSplit = "balanced", standardize: Standardize = False
) -> Dataset:
    """Load a split of EMNIST (Cohen et al. 2017) from `root`/EMNIST/raw, torchvision's folder.

    Args:
        root: folder of data sets.
        download: download missing files (560 MB) with torchvision.
        split: byclass (62 classes), bymerge (47), balanced (47), letters (26), digits (10) or mnist (10).
        standardize: standardise each channel with statistics of the training part, or each pixel: per_pixel.

    Returns:
        x [n, 1, 28, 28] uint8, upright (the files store transposed images). Labels start at 0, also those of letters.
    """
    files = _idx("EMNIST", f"emnist-{split}-train", f"emnist-{split}-test")
    stored = _load(f"emnist_{split}", "EMNIST", root, files, EMNIST_CLASSES[split], download, split=split)
    upright = stored.x.transpose(0, 1, 3, 2).copy()
    return finished(replace(stored, x=upright, y=stored.y - int(split == "letters")), standardize)


def usps(*, root: str = "data", download: bool = False, standardize: Standardize = False) -> Dataset:
    """Load USPS, 7,291 + 2,007 handwritten digits, from `root`/usps.bz2 and `root`/usps.t.bz2, torchvision's files.

    Args:
        root: folder of data sets.
        download: download missing files with torchvision.
        standardize: standardise each channel with statistics of the training part, or each pixel: per_pixel.

    Returns:
        x [9298, 1, 16, 16] uint8, 10 classes.
    """
    return finished(_load("usps", "USPS", root, ["usps.bz2", "usps.t.bz2"], 10, download), standardize)


def svhn(*, root: str = "data", download: bool = False, standardize: Standardize = False) -> Dataset:
    """Load SVHN, 73,257 + 26,032 house numbers, from `root`/train_32x32.mat and `root`/test_32x32.mat.

    Args:
        root: folder of data sets.
        download: download missing files (246 MB) with torchvision.
        standardize: standardise each channel with statistics of the training part, or each pixel: per_pixel.

    Returns:
        x [99289, 3, 32, 32] uint8, 10 classes.
    """
    files = ["train_32x32.mat", "test_32x32.mat"]
    return finished(_load("svhn", "SVHN", root, files, 10, download), standardize)


def cifar10(*, root: str = "data", download: bool = False, standardize: Standardize = False) -> Dataset:
    """Load CIFAR-10 from `root`/cifar-10-batches-py, torchvision's folder, or else from `root`/cifar10.npz.

    Args:
        root: folder of data sets.
        download: download missing files (170 MB) with torchvision.
        standardize: standardise each channel with statistics of the training part, or each pixel: per_pixel.

    Returns:
        x [60000, 3, 32, 32] uint8, 10 classes.
    """
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]
    files, packed = [f"cifar-10-batches-py/{name}" for name in names], Path(root) / "cifar10.npz"
    if packed.is_file() and not all(Path(root, file).is_file() for file in files):
        return replace(npz.load(path=str(packed), num_classes=10, standardize=standardize), name="cifar10")
    return finished(_load("cifar10", "CIFAR10", root, files, 10, download, f" (or {packed})"), standardize)


def cifar100(
    *, root: str = "data", download: bool = False, coarse: bool = False, standardize: Standardize = False
) -> Dataset:
    """Load CIFAR-100 from `root`/cifar-100-python, torchvision's folder.

    Args:
        root: folder of data sets.
        download: download missing files (169 MB) with torchvision.
        coarse: use the 20 superclasses instead of the 100 classes.
        standardize: standardise each channel with statistics of the training part, or each pixel: per_pixel.

    Returns:
        x [60000, 3, 32, 32] uint8, 100 classes (or 20).
    """
    files = [f"cifar-100-python/{name}" for name in ("train", "test", "meta")]
    dataset = _load("cifar100", "CIFAR100", root, files, 100, download)
    if coarse:  # torchvision has checked these pickles' MD5 sums, but returns their fine labels only
        parts = [pickle.loads(Path(root, file).read_bytes(), encoding="latin1") for file in files[:2]]
        dataset = replace(dataset, y=np.concatenate([part["coarse_labels"] for part in parts]), num_classes=20)
    return finished(dataset, standardize)


def _idx(kind: str, *stems: str) -> list[str]:
    """Return the files of a data set in MNIST's format: images and labels of the training part and the test part."""
    contents = "images-idx3", "labels-idx1"
    return [f"{kind}/raw/{stem}-{content}-ubyte" for stem in stems or ("train", "t10k") for content in contents]


def _load(
    name: str, kind: str, root: str, files: list[str], classes: int, download: bool, instead: str = "", **options: str
) -> Dataset:
    """Load both parts of a data set with torchvision.

    Args:
        name: the data set's name.
        kind: torchvision's class.
        root: folder of data sets.
        files: the files that torchvision reads, relative to `root`, in one folder.
        classes: C.
        download: download missing files.
        instead: what the error adds to their names.
        options: further arguments of torchvision's class.

    Raises:
        SettingsError: files are missing or damaged, or the download failed.
    """
    import torchvision.datasets

    source, called = getattr(torchvision.datasets, kind), ", ".join(Path(file).name for file in files) + instead
    expected = (
        f"{called}, the original files, unpacked; put them there, set data.root=DIR to the folder where they are, or "
        "remove what is there and set data.download=true, with a network"
    )
    with reading(f"{name} in {Path(root, files[0]).parent.absolute()}", expected):
        if kind == "SVHN":  # [n, 3, 32, 32]
            svhn = [source(root, split=split, download=download) for split in ("train", "test")]
            return joined(name, [(part.data, part.labels) for part in svhn], classes)
        parts = [source(root, train=train, download=download, **options) for train in (True, False)]
    arrays = [(np.asarray(part.data), np.asarray(part.targets)) for part in parts]
    return joined(name, [(x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2), y) for x, y in arrays], classes)
