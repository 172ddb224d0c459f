"""Loads a folder of images with one subfolder per class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import entries, finished, fixed_split, joined
from pflsim.errors import SettingsError, reading
from pflsim.progress import counted

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
Side = Annotated[int, Ge(1), Le(4096)]
"""Side length in pixels."""


def load(*, root: str | None = None, size: Side = 32, grayscale: bool = False, standardize: bool = False) -> Dataset:
    """Load images from `root`/train/CLASS/* and `root`/test/CLASS/*, or from `root`/CLASS/*.

    Without train and test folders, a fixed 80% of each class, chosen by content, is the training part.

    Args:
        root: the folder. Classes are sorted by name; hidden files and files without an image suffix are skipped.
        size: side length in pixels to which images are resized (bilinear).
        grayscale: one channel instead of three.
        standardize: standardise each channel with statistics of the training part.

    Returns:
        x [n, 3 or 1, size, size] uint8; with 16-bit images float32 from 0 to 1, where 1 is white. Transparency is
        dropped; of an animation or a file of several pages, the first is used. The name is the folder's.

    Raises:
        SettingsError: the folder does not exist, an image cannot be read or has values of more than 16 bits, a class
            has no training images, or only the test part has it.
    """
    if not root:
        raise SettingsError("data=image_folder needs data.root=DIR with train/CLASS/* and test/CLASS/*, or CLASS/*")
    from torchvision.datasets.folder import make_dataset

    parts = [Path(root, "train"), Path(root, "test")]
    if not all(map(Path.is_dir, parts)):
        parts = [Path(root)]
    with reading(f"data.root={root}", f"folders CLASS with images of each class: {', '.join(SUFFIXES)}"):
        names = [[entry.name for entry in entries(part) if entry.is_dir()] for part in parts]
        classes = {name: label for label, name in enumerate(names[0])}
        if extra := sorted({*names[-1]} - {*classes}):
            raise SettingsError(f"{parts[1]} has classes that {parts[0]} lacks: {', '.join(extra)}")
        files = [make_dataset(part, classes, is_valid_file=_is_image, allow_empty=part != parts[0]) for part in parts]
    name = Path(os.path.abspath(root)).name
    x, y = _read([image for part in files for image in part], size, grayscale)
    ends = [len(files[0])]
    dataset = joined(name, list(zip(np.split(x, ends), np.split(y, ends), strict=True))[: len(parts)], len(classes))
    return finished(dataset if len(parts) == 2 else fixed_split(dataset), standardize)


def _is_image(path: str) -> bool:
    return Path(path).suffix.lower() in SUFFIXES and not Path(path).name.startswith(".")


def _read(files: list[tuple[str, int]], size: int, grayscale: bool) -> tuple[np.ndarray, np.ndarray]:
    """Read images [n, channels, size, size] uint8, or float32 if one has 16 bits, and labels [n] int64."""
    from PIL import Image

    channels = 1 if grayscale else 3
    x = np.empty((len(files), size, size, channels), dtype=np.uint8)
    for row, (path, _) in enumerate(counted("reading pictures", files)):
        with reading(path, "an image; repair it or take it out"), Image.open(path) as image:
            deep = image.mode[0] in "IF"  # values that `convert` clips at 255
            if deep:
                values = np.asarray(image)
                if image.mode == "F" or values.min() < 0 or values.max() >= 2**16:
                    raise ValueError("its values are not integers from 0 to 65535; save it with such values")
                image = Image.fromarray((values / np.float32(2**16 - 1)).astype(np.float32))
                x = x.astype(np.float32) / 255 if x.dtype == np.uint8 else x
            else:
                image = image.convert("L" if grayscale else "RGB")
            pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR)).reshape(size, size, -1)
            x[row] = pixels if deep or x.dtype == np.uint8 else pixels / np.float32(255)
    return x.transpose(0, 3, 1, 2), np.array([label for _, label in files], dtype=np.int64)
