"""Any folder of images, a subfolder per class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pflsim.data.dataset import Dataset
from pflsim.data.sources.common import finished, fixed_split, joined
from pflsim.errors import SettingsError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


def load(*, root: str | None = None, size: int = 32, grayscale: bool = False, standardize: bool = False) -> Dataset:
    """Load images from `root`/train/CLASS/* and `root`/test/CLASS/*, or from `root`/CLASS/*.

    With a single level, a fixed 80% of each class, chosen by content, serves as the official training part.

    Args:
        root: the folder. Classes are numbered in the order of their names; files whose names begin with a dot or do not
            end like an image's are passed over.
        size: every image is brought to size × size pixels (bilinear).
        grayscale: one channel instead of three.
        standardize: subtract the mean and divide by the deviation of each channel over the training part.

    Returns:
        x [n, 3 or 1, size, size] uint8. The name is the folder's.

    Raises:
        SettingsError: no such folder, no images, an unreadable image, or a class that only the test part has.
    """
    if not root:
        raise SettingsError("data=image_folder needs data.root=DIR with train/CLASS/* and test/CLASS/*, or CLASS/*")
    if size < 1:
        raise SettingsError(f"data.size={size} is not at least 1 pixel")
    folder = Path(root)
    if not folder.is_dir():
        raise SettingsError(f"data.root={root}: no such folder (looked for {folder.resolve()})")
    name = folder.resolve().name
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        classes = _class_names(folder / "train")
        extra = sorted(set(_class_names(folder / "test")) - set(classes))
        if extra:
            raise SettingsError(f"{folder / 'test'} has classes that {folder / 'train'} lacks: {', '.join(extra)}")
        train, test = (_read(folder / part, classes, size, grayscale) for part in ("train", "test"))
        return finished(joined(name, train, test, len(classes)), standardize)
    classes = _class_names(folder)
    x, y = _read(folder, classes, size, grayscale)
    return finished(fixed_split(Dataset(name, x, y, len(classes), len(y))), standardize)


def _files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))


def _class_names(folder: Path) -> list[str]:
    names = sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))
    if not names:
        raise SettingsError(f"{folder} has no class folders: expected {folder}/CLASS/* with images of each class")
    return names


def _read(folder: Path, classes: list[str], size: int, grayscale: bool) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, channels, size, size] uint8 and labels [n] int64, by class and then by file name."""
    images, labels = [], []
    for label, name in enumerate(classes):
        files = _files(folder / name) if (folder / name).is_dir() else []
        images += [_image(file, size, grayscale) for file in files]
        labels += [label] * len(files)
    if not images:
        raise SettingsError(f"{folder} has no images: looked for {', '.join(SUFFIXES)} in {folder}/CLASS/")
    return np.stack(images), np.array(labels, dtype=np.int64)


def _image(path: Path, size: int, grayscale: bool) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(path) as image:
            image = image.convert("L" if grayscale else "RGB")
            if image.size != (size, size):
                image = image.resize((size, size), Image.Resampling.BILINEAR)
            pixels = np.asarray(image, dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow's decoders raise
        raise SettingsError(f"{path} cannot be read as an image ({error}); repair it or take it out") from error
    return pixels[None] if grayscale else pixels.transpose(2, 0, 1)
