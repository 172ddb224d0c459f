"""Shift rules: give groups of clients other inputs or labels.

A rule is `rule(dataset, clients, rng, *, settings) -> Shift`. All examples of a client change alike: for training,
validation and test. Groups are random and have equal sizes ± 1; group 0 keeps its examples.
"""

import math
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pflsim.config.validate import NonNegative, bounded
from pflsim.data.dataset import Dataset
from pflsim.errors import SettingsError
from pflsim.seeding import numpy_generator


@dataclass(frozen=True)
class Change:
    """What happens to the examples of a group; this one keeps them."""

    def inputs(self, dataset: Dataset, rows: np.ndarray) -> Tensor:
        """Return the inputs [n, ...] of rows of the data set: as stored, or float32 after scaling."""
        return torch.from_numpy(dataset.x[rows])

    def labels(self, dataset: Dataset, rows: np.ndarray) -> np.ndarray:
        """Return the labels [n] int64 of rows of the data set."""
        return dataset.y[rows]


@dataclass(frozen=True)
class Rotation(Change):
    """Rotates images counter-clockwise, by an angle in degrees."""

    angle: float

    def inputs(self, dataset: Dataset, rows: np.ndarray) -> Tensor:
        """Return rotated images of the stored type and size."""
        return rotated(torch.from_numpy(dataset.x[rows]), self.angle)


@dataclass(frozen=True)
class Inversion(Change):
    """Replaces each stored value by `total` minus the value; `total` is the least plus the greatest possible one."""

    total: float

    def inputs(self, dataset: Dataset, rows: np.ndarray) -> Tensor:
        """Return inverted images of the stored type."""
        return torch.from_numpy(dataset.x.dtype.type(self.total) - dataset.x[rows])


@dataclass(frozen=True)
class Noise(Change):
    """Adds Gaussian noise to scaled values. The noise of an example depends on its stored values and the seed."""

    deviation: float
    seed: int

    def inputs(self, dataset: Dataset, rows: np.ndarray) -> Tensor:
        """Return noisy images, float32."""
        x = dataset.x[rows].astype(np.float32) / np.float32(dataset.scale if dataset.x.dtype == np.uint8 else 1)
        for image, row in zip(x, rows, strict=True):  # by content, since the order of stored rows must not matter
            digest = blake2b(dataset.x[row].tobytes(), digest_size=16).hexdigest()
            draw = numpy_generator(self.seed, f"noise of {digest}").standard_normal(image.shape, np.float32)
            image += np.float32(self.deviation) * draw
        return torch.from_numpy(x)


@dataclass(frozen=True)
class LabelPermutation(Change):
    """Replaces label c by `permutation[c]`."""

    permutation: tuple[int, ...]

    def labels(self, dataset: Dataset, rows: np.ndarray) -> np.ndarray:
        """Return permuted labels."""
        return np.array(self.permutation)[dataset.y[rows]]


@dataclass(frozen=True)
class Shift:
    """How the examples of each client differ from those of the data set.

    Args:
        groups: the group of each client; () if no client's examples change.
        changes: what happens to the examples of each group.
    """

    groups: tuple[int, ...] = ()
    changes: tuple[Change, ...] = ()

    def of(self, client: int) -> Change:
        """Return what happens to the examples of a client."""
        return self.changes[self.groups[client]] if self.groups else Change()

    def record(self) -> dict[str, Any]:
        """Return everything that determines the shift, for partition.json and its hash."""
        return {"groups": list(self.groups), "changes": [asdict(change) for change in self.changes]}


def none(dataset: Dataset, clients: int, rng: np.random.Generator) -> Shift:
    """Leave all examples as they are."""
    return Shift()


def rotation(dataset: Dataset, clients: int, rng: np.random.Generator, *, groups: int = 4) -> Shift:
    """Rotate the images of group g by g·360°/groups, counter-clockwise.

    Multiples of 90° move pixels (multiples of 180° if images are not square). Other angles interpolate bilinearly, with
    zeros outside the image, and round uint8 images to stored values.

    Args:
        dataset: images.
        clients: N.
        rng: draws the groups.
        groups: number of groups, 1 to N.
    """
    _check_images(dataset, "rotation")
    return Shift(_groups(groups, clients, rng), tuple(Rotation(360 * g / groups) for g in range(groups)))


def inversion(dataset: Dataset, clients: int, rng: np.random.Generator) -> Shift:
    """Invert the pixel values of half of the clients: the greatest possible value becomes the least.

    Args:
        dataset: images. The values of uint8 images are 0 to 255 (digits: 16); of others, those that occur count.
        clients: N, at least 2.
        rng: draws the groups.
    """
    _check_images(dataset, "inversion")
    x = dataset.x
    total = dataset.scale if x.dtype == np.uint8 else float(x.min()) + float(x.max())
    return Shift(_groups(2, clients, rng), (Change(), Inversion(total)))


def noise(
    dataset: Dataset, clients: int, rng: np.random.Generator, *, sigma: NonNegative = 0.5, groups: int = 4
) -> Shift:
    """Add Gaussian noise of standard deviation sigma·g/groups to the images of group g.

    An example has the same noise every time. Values are not clipped.

    Args:
        dataset: images.
        clients: N.
        rng: draws the groups and the seed of the noise.
        sigma: level of the noise, in units of the scaled values (uint8 images: 1 is white), before standardisation.
        groups: number of groups, 1 to N.
    """
    _check_images(dataset, "noise")
    members, seed = _groups(groups, clients, rng), int(rng.integers(2**63))
    return Shift(members, tuple(Noise(sigma * g / groups, seed) for g in range(groups)))


def permuted_labels(dataset: Dataset, clients: int, rng: np.random.Generator, *, groups: int = 2) -> Shift:
    """Give each group another random permutation of the class labels; group 0 keeps them (concept shift).

    Args:
        dataset: any data.
        clients: N.
        rng: draws the groups and the permutations.
        groups: number of groups, 1 to N, and at most the number of permutations.
    """
    classes = dataset.num_classes
    if dataset.task != "classification":
        raise SettingsError(f"shift=permuted_labels needs classes, but {dataset.name} has targets of {dataset.task}")
    if classes < 20:
        bounded("shift.groups", groups, 1, math.factorial(classes))
    members, permutations = _groups(groups, clients, rng), [tuple(range(classes))]
    while len(permutations) < groups:
        drawn = tuple(rng.permutation(classes).tolist())
        permutations += [drawn] if drawn not in permutations else []
    return Shift(members, tuple(map(LabelPermutation, permutations)))


def rotated(images: Tensor, angle: float) -> Tensor:
    """Return images [n, channels, height, width] rotated by an angle in degrees, see `rotation`."""
    height, width = images.shape[2:]
    if angle % (90 if height == width else 180) == 0:
        return images.rot90(int(angle // 90), (2, 3)).contiguous()
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    matrix = torch.tensor([[cos, -sin * height / width, 0], [sin * width / height, cos, 0]])  # from result to image
    grid = functional.affine_grid(matrix[None], [1, 1, height, width], align_corners=False)
    values = functional.grid_sample(images.float(), grid.expand(len(images), -1, -1, -1), align_corners=False)
    return values.to(images.dtype) if images.is_floating_point() else values.round_().to(images.dtype)


def _groups(groups: int, clients: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Return a random group for each client, of equal sizes ± 1."""
    bounded("shift.groups", groups, 1, clients)
    return tuple(rng.permutation(np.arange(clients) % groups).tolist())


def _check_images(dataset: Dataset, name: str) -> None:
    if dataset.kind != "images":
        raise SettingsError(
            f"shift={name} needs images, but {dataset.name} has {dataset.kind}; leave shift out, or use "
            "shift=permuted_labels"
        )
