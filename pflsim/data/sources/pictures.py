"""Pictures of files and Python objects: which files are pictures, and what a viewer shows of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pflsim.config.names import some
from pflsim.data.sources.common import is_hidden

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

UNREAD = {".heic", ".heif", ".svg"}
"""Endings of pictures that Pillow does not open: they are refused, where other files are skipped."""


class Files(NamedTuple):
    """What is below a folder, as paths relative to it."""

    pictures: list[Path]
    folders: list[Path]
    hidden: list[str]
    others: list[str]

    @property
    def skipped(self) -> str:
        """Return the numbers and some names of hidden entries and of files that are no pictures; "" without any."""
        kinds = {"hidden files or folders": self.hidden, "files that are no pictures": self.others}
        return "; ".join(f"{len(names):,} {kind} ({some(sorted(names))})" for kind, names in kinds.items() if names)


def pictures_in(root: Path) -> Files:
    """Return the pictures in a folder and in those below it.

    A file is a picture if its ending is one of Pillow's, in any case, or if Pillow opens it.

    Raises:
        OSError: a folder cannot be read.
    """
    from PIL import Image

    found, endings = Files([], [], [], []), Image.registered_extensions()
    known = UNREAD.union(ending for ending, kind in endings.items() if kind in Image.OPEN)
    for folder, folders, files in os.walk(root, followlinks=True, onerror=_stop):
        place = Path(folder).relative_to(root)
        found.hidden.extend(filter(is_hidden, [*folders, *files]))
        folders[:] = [name for name in folders if not is_hidden(name)]
        found.folders.extend(place / name for name in folders)
        for path in (Path(folder, name) for name in files if not is_hidden(name)):
            if path.suffix.lower() in known or _opens(path):
                found.pictures.append(place / path.name)
            else:
                found.others.append(path.name)
    return found


def _stop(error: OSError) -> None:
    raise error


def _opens(path: Path) -> bool:
    from PIL import Image

    try:
        with Image.open(path):
            return True
    except Exception:  # of any of Pillow's formats
        return False


def shown(picture: Picture, background: tuple[int, ...] = (255, 255, 255), grayscale: bool | None = None) -> Picture:
    """Return what a viewer shows of a picture: turned by its EXIF tag, transparency on a background.

    Args:
        picture: of any mode.
        background: red, green and blue, 0 to 255.
        grayscale: one channel, or three; None: one if the picture has shades of grey only.

    Returns:
        Of mode L or RGB; with 16 bits of mode F, from 0 to 1, where 1 is white.

    Raises:
        ValueError: it has values of more than 16 bits.
    """
    from PIL import Image, ImageOps

    picture = ImageOps.exif_transpose(picture)
    if picture.mode[0] in "IF":  # values that `convert` clips at 255
        values = np.asarray(picture)
        if picture.mode == "F" or values.min() < 0 or values.max() >= 2**16:
            raise ValueError(f"its values are of mode {picture.mode}; save it with integers from 0 to 65535")
        return Image.fromarray((values / np.float32(2**16 - 1)).astype(np.float32))
    if grayscale is None:
        grayscale = picture.mode in ("1", "L", "LA", "La")
    if picture.has_transparency_data:
        ground = Image.new("RGBA", picture.size, (*background, 255))
        picture = Image.alpha_composite(ground, picture.convert("RGBA"))
    return picture.convert("L" if grayscale else "RGB")
