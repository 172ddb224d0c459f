"""Loads a folder of images with one subfolder per class."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from pflsim.config.validate import Bounds, check_room
from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import entries, finished, fixed_split, joined, reading
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
    parts = [folder / "train", folder / "test"]
    if not all(map(Path.is_dir, parts)):
        parts = [folder]
    classes, tested = _class_names(parts[0]), _class_names(parts[-1])
    if extra := sorted({*tested} - {*classes}):
        raise SettingsError(f"{parts[1]} has classes that {parts[0]} lacks: {', '.join(extra)}")
    files = [_images(part, classes) for part in parts]
    found = {label for _, label in files[0]}
    if empty := [name for label, name in enumerate(classes) if label not in found]:
        raise SettingsError(
            f"{parts[0] / empty[0]} has no images: looked for {', '.join(SUFFIXES)}; put some there, or take "
            f"the folder out (empty: {len(empty)} of {len(classes)} classes)"
        )
    name = Path(os.path.abspath(folder)).name
    dataset = joined(name, [_read(part, size, grayscale) for part in files], len(classes))
    return finished(dataset if len(parts) == 2 else fixed_split(dataset), standardize)


def _class_names(folder: Path) -> list[str]:
    names = [entry.name for entry in entries(folder) if entry.is_dir()]
    if not names:
        raise SettingsError(f"{folder} has no class folders: expected {folder}/CLASS/* with images of each class")
    return names


def _images(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """Return the images of a part with their labels, sorted by class and file name."""
    return [
        (file, label)
        for label, name in enumerate(classes)
        for file in (entries(folder / name) if (folder / name).is_dir() else [])
        if file.suffix.lower() in SUFFIXES
    ]


def _read(files: list[tuple[Path, int]], size: int, grayscale: bool) -> tuple[np.ndarray, np.ndarray]:
    """Read images [n, channels, size, size] uint8 and labels [n] int64."""
    from PIL import Image

    channels = 1 if grayscale else 3
    check_room(f"data.size={size} with {len(files)} images", len(files) * channels * size**2, "use a smaller size")
    x = np.empty((len(files), size, size, channels), dtype=np.uint8)
    for row, (path, _) in enumerate(files):
        with reading(path, "an image; repair it or take it out"), Image.open(path) as image:
            image = image.convert("L" if grayscale else "RGB")
            if image.size != (size, size):
                image = image.resize((size, size), Image.Resampling.BILINEAR)
            x[row] = np.asarray(image).reshape(size, size, channels)
    return x.transpose(0, 3, 1, 2), np.array([label for _, label in files], dtype=np.int64)
