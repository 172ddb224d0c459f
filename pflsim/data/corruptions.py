"""Corruptions of images and tables at five severities; those of images have the constants of CIFAR-10-C.

Hendrycks and Dietterich (2019). Images are [channels, height, width] in [0, 1], with one channel or three; the result
is clipped to [0, 1].
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from pflsim.config.settings import CORRUPTIONS
from pflsim.data.dataset import Dataset
from pflsim.errors import SettingsError
from pflsim.seeding import numpy_generator


def gaussian_noise(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Add noise of standard deviation c."""
    return x + c * rng.standard_normal(x.shape)


def shot_noise(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Draw the number of photons, of which white is c."""
    return rng.poisson(x * c) / c


def impulse_noise(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Replace a share c of the values, half by 0 and half by 1."""
    drawn = rng.random(x.shape)
    return np.where(drawn < c / 2, 0.0, np.where(drawn < c, 1.0, x))


def gaussian_blur(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Blur with standard deviation c in pixels."""
    from scipy.ndimage import gaussian_filter

    return gaussian_filter(x, (0, c, c), mode="nearest", truncate=4.0)


def contrast(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Multiply the differences to the mean of each channel by c."""
    mean = x.mean((1, 2), keepdims=True)
    return (x - mean) * c + mean


def brightness(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Add c to the value V of HSV, the largest channel; black becomes grey."""
    value = x.max(0, keepdims=True)
    brighter = np.minimum(value + c, 1)
    return np.where(value > 0, x * brighter / np.where(value > 0, value, 1), brighter)


def pixelate(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Shrink to c of the size and enlarge, both with a box filter, through 8 bits."""
    from PIL.Image import Resampling

    image = _image(x)
    small = image.resize((max(int(image.width * c), 1), max(int(image.height * c), 1)), Resampling.BOX)
    return _array(small.resize(image.size, Resampling.BOX))


def jpeg(x: np.ndarray, c: float, rng: Generator) -> np.ndarray:
    """Compress with quality c, from 8 bits."""
    from PIL import Image

    file = io.BytesIO()
    _image(x).save(file, "JPEG", quality=int(c))
    return _array(Image.open(file))


IMAGES: dict[str, tuple[Callable[[np.ndarray, float, Generator], np.ndarray], tuple[float, ...]]] = {
    "gaussian_noise": (gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": (impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "gaussian_blur": (gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "contrast": (contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "brightness": (brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "pixelate": (pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg": (jpeg, (80, 65, 58, 50, 40)),
}
"""Corruptions of images, with their constant c for each severity."""
TABLES = {"feature_noise": (0.1, 0.2, 0.3, 0.5, 1.0), "missing_columns": (0.1, 0.2, 0.3, 0.4, 0.5)}
"""Those of tables: c standard deviations of noise, or a share c of columns that have their mean."""


@dataclass(frozen=True, slots=True, eq=False)
class Corruptor:
    """Corrupts one input at a time, always in the same way.

    Args:
        severity: 1 to 5.
        seed: of the run.
        mean, std: of each column of a table.
    """

    severity: int
    seed: int
    mean: np.ndarray
    std: np.ndarray

    def __call__(self, name: str, x: np.ndarray, digest: str, client: int) -> np.ndarray:
        """Return a corrupted input, float32.

        Args:
            name: of the corruption.
            x: an image or a row of a table, before standardisation.
            digest: of the stored row, which decides the random numbers.
            client: the client, which decides the missing columns.
        """
        rng, place = numpy_generator(self.seed, f"{name} of {digest}"), self.severity - 1
        if name in IMAGES:
            corrupt, constants = IMAGES[name]
            image = x.astype(np.float64).clip(0, 1)  # a shift may add noise
            return corrupt(image, constants[place], rng).clip(0, 1).astype(np.float32)
        c = TABLES[name][place]
        if name == "feature_noise":
            return (x + c * self.std * rng.standard_normal(x.shape)).astype(np.float32)
        columns = numpy_generator(self.seed, name, client).permutation(len(x))[: max(1, int(c * len(x) + 0.5))]
        found = x.astype(np.float32)
        found[columns] = self.mean[columns]
        return found


def fitting(dataset: Dataset, key: str) -> tuple[str, ...]:
    """Return the names of the corruptions that fit the inputs.

    Args:
        dataset: the data set.
        key: the test set that needs them, for the message.

    Raises:
        SettingsError: none does, or the test set is one of other inputs.
    """
    names, x = tuple({"images": IMAGES, "tables": TABLES}.get(dataset.kind, ())), dataset.x
    of = f"eval.sets={key}: {dataset.name} has"
    if key in CORRUPTIONS and key not in names or not names:
        raise SettingsError(f"{of} {dataset.kind}, and fitting corruptions are {', '.join(names) or 'none'}")
    if dataset.kind == "images":
        least, most = (float(end) / (dataset.scale if x.dtype == np.uint8 else 1) for end in (x.min(), x.max()))
        if not 0 <= least <= most <= 1 or x.shape[1] not in (1, 3):
            found = f"{x.shape[1]} channels with values in [{least:.4g}, {most:.4g}]"
            raise SettingsError(f"{of} {found}; corruptions of images need 1 or 3 channels in [0, 1]")
    return names


def _image(x: np.ndarray) -> Any:
    from PIL import Image

    values = np.rint(x * 255).astype(np.uint8)
    return Image.fromarray(values[0] if len(values) == 1 else values.transpose(1, 2, 0))


def _array(image: Any) -> np.ndarray:
    values = np.asarray(image, np.float64) / 255
    return values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
