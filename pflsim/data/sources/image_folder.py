"""Loads a folder of images with one subfolder per class."""

import os
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from pflsim.config.names import some
from pflsim.data.dataset import Card, Dataset
from pflsim.data.sources.common import finished, fixed_split, scale_of
from pflsim.data.sources.pictures import UNREAD, Files, pictures_in, shown
from pflsim.data.targets import about_targets
from pflsim.errors import SettingsError, reading
from pflsim.progress import counted

PARTS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2, "testing": 2}
"""Names of folders of the training, validation and test part, in lower case."""
DARK = 0.1
"""Pictures of 16 bits below this share of white are those of a camera or scanner with fewer bits."""
EXPECTED = "folders CLASS with pictures (.png, .jpg, ...), or folders train and test with them"
Side = Annotated[int, Ge(1), Le(4096)]
"""Side length in pixels."""
Pictures = dict[str, list[Path]]
"""The pictures of each class."""


def load(
    *,
    root: str | None = None,
    size: Side = 32,
    grayscale: bool = False,
    background: str = "white",
    standardize: bool = False,
) -> Dataset:
    """Load images from `root`/train/CLASS/* and `root`/test/CLASS/*, or from `root`/CLASS/*.

    The folders of parts are called train or training, val, valid or validation, and test or testing, in any case. A
    validation part belongs to the training part; without a test part, it is the test part. With neither, a fixed 80% of
    each class, chosen by content, is the training part.

    Args:
        root: the folder. Classes are sorted by name. Pictures are what Pillow opens, in the folder of a class or below
            it; hidden files and folders and other files are skipped.
        size: side length in pixels to which images are resized (bilinear).
        grayscale: one channel instead of three.
        background: colour behind transparent pixels: a name or #rrggbb.
        standardize: standardise each channel with statistics of the training part.

    Returns:
        x [n, 3 or 1, size, size] uint8; with 16-bit images float32 from 0 to 1, where 1 is white. Images are turned by
        their EXIF tag; of an animation or a file of several pages, the first is used. The name is the folder's, and
        `values` are the names of the classes.

    Raises:
        SettingsError: the folder does not exist, an image cannot be read or has values of more than 16 bits, a class
            folder has no training images, or a part has no class of the training part.
    """
    if not root:
        raise SettingsError("data=image_folder needs data.root=DIR with train/CLASS/* and test/CLASS/*, or CLASS/*")
    from PIL import ImageColor

    with reading(f"data.background={background}", "the name of a colour, or #rrggbb"):
        colour = ImageColor.getrgb(background)[:3]
    with reading(f"data.root={root}", EXPECTED):
        files = pictures_in(Path(root))
    if unread := [path for path in files.pictures if path.suffix.lower() in UNREAD]:
        said = f"{len(unread)} pictures such as {unread[0]} are of a kind that Pillow does not open"
        raise SettingsError(f"data.root={root}: {said}; save them as JPEG or PNG, or take them out")
    folders, left_out = _folders(root, files)
    parts = [_by_class(folder, files) for folder in folders]
    loose = sum(len(part.pop("", ())) for part in parts)
    _check(root, folders, parts, files)
    names = sorted({name for part in parts for name in part})
    ordered = [[(path, c) for c, name in enumerate(names) for path in part.get(name, ())] for part in parts]
    ends = [*accumulate(map(len, ordered))]
    x, card, white = _read(Path(root), [path for part in ordered for path, _ in part], size, grayscale, colour)
    y = np.array([c for part in ordered for _, c in part], dtype=np.int64)
    name = Path(os.path.abspath(root)).name
    called = [folder.name for folder in folders]
    notes = [f"{name}: {loose} pictures outside of class folders are left out"] if loose else []
    if len(called) > 1 and (left_out or called != ["train", "test"]):
        parts_read = f"{name}: training part {' and '.join(called[:-1])}, test part {called[-1]}"
        notes.append(parts_read + f"; other folders are left out: {left_out}" * bool(left_out))
    if 0 < white < DARK:
        said = f"no pixel of the pictures of 16 bits or more is brighter than {white:.1%} of white"
        notes.append(f"{name}: {said}; scale them to 0 to 65535, or set data.standardize=true")
    if parts_as_classes := [c for c in names if c.lower() in PARTS]:
        notes.append(f"{name}: classes, not parts, because there are other folders: {', '.join(parts_as_classes)}")
    dataset = Dataset(name, x, y, len(names), ends[max(len(ends) - 2, 0)], scale=scale_of(x))
    dataset = replace(dataset, values=tuple(names), notes=tuple(notes))
    card += (("label", about_targets(dataset)), *((("skipped", files.skipped),) if files.skipped else ()))
    dataset = replace(dataset, card=Card(card))
    return finished(dataset if len(parts) > 1 else fixed_split(dataset), standardize)


def _folders(root: str, files: Files) -> tuple[list[Path], str]:
    """Return the folders of the parts, training first, or the only one; and names of others that are left out."""
    top = [folder for folder in files.folders if len(folder.parts) == 1]
    found = sorted((PARTS[key], folder) for folder in top if (key := folder.name.lower()) in PARTS)
    numbers, others = [number for number, _ in found], {*top} - {folder for _, folder in found}
    if not found or (others and (0 not in numbers or len(numbers) == 1)):  # a class may be called train
        return [Path()], ""
    if 0 not in numbers or len({*numbers}) < len(numbers):
        said = ", ".join(folder.name for _, folder in found)
        raise SettingsError(f"data.root={root} has the folders {said}; expected one of each: train, val and test")
    folders = [folder for number, folder in found if not number or any(_by_class(folder, files).values())]
    return folders, some(sorted(folder.name for folder in others))


def _by_class(folder: Path, files: Files) -> Pictures:
    """Return the pictures of each class of a part, in sorted order; "" has those outside of class folders."""
    found: Pictures = {}
    own = [path for path in files.pictures if path.is_relative_to(folder)]
    for path in sorted(own, key=lambda path: (str(path.parent), path.name)):
        above = path.relative_to(folder).parts[:-1]
        found.setdefault(unicodedata.normalize("NFC", above[0]) if above else "", []).append(path)
    return found


def _check(root: str, folders: Sequence[Path], parts: Sequence[Mapping[str, object]], files: Files) -> None:
    """Raise a `SettingsError` if a part has no classes, or none of the training part's."""
    (first, *_), known = folders, parts[0]
    classes = [folder for folder in files.folders if folder.parent == first]
    lacking = [folder.name for folder in classes if unicodedata.normalize("NFC", folder.name) not in known]
    if lacking or not known:
        found = f"no pictures in {some(sorted(lacking))}" if lacking else "no folder of a class"
        raise SettingsError(f"data.root={root}: {found}; expected {EXPECTED}")
    below = sorted(folder.name for folder in files.folders if folder.parent in classes)
    if len(known) == 1 and len(below) > 1:
        raise SettingsError(
            f"data.root={root} has one class, {classes[0]}, with the folders {some(below)}; "
            f"if these are the classes, set data.root={Path(root, classes[0])}"
        )
    for folder, part in zip(folders, parts, strict=True):
        if not {*part} & {*known}:
            found = some(sorted(part)) or "none"
            raise SettingsError(
                f"data.root={root}: {folder} has no folder of a class of {first} (found: {found}); move "
                f"its pictures to {folder}/CLASS, or set data.root={Path(root, first)}, of which 20% are for testing"
            )


def _read(
    root: Path, files: Sequence[Path], size: int, grayscale: bool, background: tuple[int, ...]
) -> tuple[np.ndarray, tuple[tuple[str, str], ...], float]:
    """Read images [n, channels, size, size] uint8, or float32 if one has 16 bits; describe them for the card.

    Also returns the brightest pixel of those with 16 bits, 0 to 1; 0 if there are none.
    """
    from PIL import Image

    sizes, modes, pages, white = Counter[str](), Counter[str](), 0, 0.0
    x = np.empty((len(files), size, size, 1 if grayscale else 3), dtype=np.uint8)
    for row, path in enumerate(counted("reading pictures", files)):
        with reading(root / path, "an image; repair it or take it out"), Image.open(root / path) as image:
            picture = shown(image, background, grayscale)
            modes[image.mode] += 1
            sizes[f"of {picture.width}x{picture.height}"] += 1
            pages += getattr(image, "n_frames", 1) > 1
            deep = picture.mode == "F"
            if deep and x.dtype == np.uint8:
                x = x.astype(np.float32) / 255
            pixels = np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR)).reshape(size, size, -1)
            white = max(white, float(pixels.max())) if deep else white
            x[row] = pixels if deep or x.dtype == np.uint8 else pixels / np.float32(255)
    said = f"; of {pages:,} with several pages, the first is read" * (pages > 0)
    return x.transpose(0, 3, 1, 2), (("pictures", f"{_counts(sizes)}; {_counts(modes)}{said}"),), white


def _counts(found: Counter[str], most: int = 3) -> str:
    """Return the most frequent values with their numbers, and the number of the other values."""
    named = [f"{count:,} {value}" for value, count in found.most_common(most)]
    return ", ".join(named) + f", and {len(found) - most} others" * (len(found) > most)
