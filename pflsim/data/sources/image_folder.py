"""Loads a folder of images with one subfolder per class."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from pflsim.config.validate import Bounds, check_room
from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import entries, finished, fixed_split, joined, reason
from pflsim.errors import SettingsError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
MAX_SIZE = 4096
"""Maximum side length in pixels."""


def load(*, root: str | None = None, size: int = 32, grayscale: bool = False, standardize: bool = False) -> Dataset:
    """Load images from `root`/train/CLASS/* and `root`/test/CLASS/*, or from `root`/CLASS/*.

    Without train and test folders, a fixed 80% of each class, chosen by content, is the training part.

    Args:
        root: the folder. Classes are sorted by name; hidden files and files without an image suffix are skipped.
        size: side length in pixels to which images are resized (bilinear).
        grayscale: one channel instead of three.
        standardize: standardise each channel with statistics of the training part.

    Returns:
        x [n, 3 or 1, size, size] uint8. The name is the folder's.

    Raises:
        SettingsError: the folder does not exist, an image cannot be read, or a class has no training images.
    """
    if not root:
        raise SettingsError("data=image_folder needs data.root=DIR with train/CLASS/* and test/CLASS/*, or CLASS/*")
    Bounds(1, MAX_SIZE)("data.size", size)
    folder = Path(root)
    if not folder.is_dir():
        raise SettingsError(f"data.root={root}: no such folder (looked for {folder.absolute()})")
    name, parts = Path(os.path.abspath(folder)).name, [folder / "train", folder / "test"]
    if not all(map(Path.is_dir, parts)):
        classes = _class_names(folder)
        x, y = _read(_list(folder, classes, needed=classes), size, grayscale)
        return finished(fixed_split(Dataset(name, x, y, len(classes), len(y))), standardize)
    classes, tested = map(_class_names, parts)
    extra = sorted(set(tested) - set(classes))
    if extra:
        raise SettingsError(f"{parts[1]} has classes that {parts[0]} lacks: {', '.join(extra)}")
    train, test = (
        _read(_list(part, classes, needed), size, grayscale) for part, needed in zip(parts, (classes, []), strict=True)
    )
    return finished(joined(name, train, test, len(classes)), standardize)


def _class_names(folder: Path) -> list[str]:
    names = [entry.name for entry in entries(folder) if entry.is_dir()]
    if not names:
        raise SettingsError(f"{folder} has no class folders: expected {folder}/CLASS/* with images of each class")
    return names


def _list(folder: Path, classes: list[str], needed: list[str]) -> list[tuple[Path, int]]:
    """Return the images of a part with their labels, sorted by class and file name; `needed` classes must have some."""
    files: list[tuple[Path, int]] = []
    empty: list[str] = []
    for label, name in enumerate(classes):
        inside = entries(folder / name) if (folder / name).is_dir() else []
        images = [(file, label) for file in inside if file.suffix.lower() in SUFFIXES]
        files += images
        empty += [] if images else [name]
    if not files or any(name in needed for name in empty):
        raise SettingsError(
            f"{folder / empty[0]} has no images: looked for {', '.join(SUFFIXES)}; put some there, or take the folder "
            f"out (empty: {len(empty)} of {len(classes)} classes)"
        )
    return files


def _read(files: list[tuple[Path, int]], size: int, grayscale: bool) -> tuple[np.ndarray, np.ndarray]:
    """Read images [n, channels, size, size] uint8 and labels [n] int64."""
    channels = 1 if grayscale else 3
    check_room(f"data.size={size} with {len(files)} images", len(files) * channels * size**2, "use a smaller size")
    x = np.empty((len(files), channels, size, size), dtype=np.uint8)
    for row, (path, _) in enumerate(files):
        x[row] = _image(path, size, grayscale)
    return x, np.array([label for _, label in files], dtype=np.int64)


def _image(path: Path, size: int, grayscale: bool) -> np.ndarray:
    from PIL import Image

    if not path.is_file():
        raise SettingsError(f"{path} cannot be read as an image (it is no file); repair it or take it out")
    try:
        with Image.open(path) as image:
            image = image.convert("L" if grayscale else "RGB")
            if image.size != (size, size):
                image = image.resize((size, size), Image.Resampling.BILINEAR)
            pixels = np.asarray(image, dtype=np.uint8)
    except Exception as error:  # decoders raise various errors for invalid bytes
        raise SettingsError(f"{path} cannot be read as an image ({reason(error)}); repair it or take it out") from error
    return pixels[None] if grayscale else pixels.transpose(2, 0, 1)
