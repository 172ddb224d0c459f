"""The rows of each client in a data set, and one client's shard as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pflsim.data.corruptions import Corruptor
from pflsim.data.dataset import Dataset
from pflsim.data.shifts import Shift
from pflsim.errors import called
from pflsim.types import Split

FORWARD_BATCH = {"cpu": 128, "cuda": 1024}
"""Examples per forward pass by device. On CPUs, the activations of larger batches exceed the cache."""
ROW_BITS = 40
"""Lower bits of an augmented row number, which hold the row; the bits above hold the number of the variant."""


@dataclass(frozen=True, slots=True, eq=False)
class TestSet:
    """Rows on which a client is judged besides its own test rows.

    Args:
        rows: their numbers in the data set.
        owners: the client that has each of them, whose shift it keeps.
        corruptions: how each of them is corrupted; "": not at all.
        corruptor: corrupts them; None: no row is corrupted.
    """

    rows: np.ndarray
    owners: np.ndarray
    corruptions: np.ndarray
    corruptor: Corruptor | None = None

    def taken(self, index: np.ndarray) -> TestSet:
        """Return some of the rows, by number or by mask."""
        return TestSet(self.rows[index], self.owners[index], self.corruptions[index], self.corruptor)


@dataclass(frozen=True, slots=True)
class Partition:
    """Row numbers of the data set: one ascending array per client and split, how its examples are shifted, and names.

    `names` are those of the clients: given, or those of the data if every client has the training rows of one; else ().
    The first `fitted` clients decide what all have in common, see `common`; None: all do. `sets` are the test sets of
    `eval.sets` by name, one for each client that trains; the partition's hash ignores them. `documents` are the data
    set and the partition before they were packed in blocks of tokens; the records count these.
    """

    train: tuple[np.ndarray, ...]
    val: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    shift: Shift = Shift()
    names: tuple[str, ...] = ()
    fitted: int | None = None
    sets: Mapping[str, tuple[TestSet, ...]] = field(default_factory=dict)
    documents: tuple[Dataset, Partition] | None = None

    @property
    def common(self) -> tuple[np.ndarray, ...]:
        """Return the training rows that give the encoder, the scale of targets and class weights, by client."""
        return self.train[: self.fitted]

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self.train)

    def ordered(self, order: Sequence[int]) -> Partition:
        """Return the partition with its clients in another order; of the shift, nothing changes."""
        parts = ("train", "val", "test", "names")
        given = {name: tuple(own[client] for client in order) for name in parts if (own := getattr(self, name))}
        return replace(self, **given)

    def called(self, client: int) -> str:
        """Return a client's id and name for a message."""
        return called(client, self.names)


@dataclass(frozen=True, slots=True)
class CropFlip:
    """Pads images with zeros, crops them to their size at a random place, and flips half of them horizontally.

    A variant of an image is a number v = 2·((2q+1)·i + j) + f: the crop begins in row (i + p) mod (2p+1) and column
    (j + q) mod (2q+1) of the image padded by p rows and q columns on each side, and f = 1 flips it after that. Variant
    0 is the image itself.

    Args:
        size: height and width of the images, in pixels.
        generator: draws the variants.
    """

    size: tuple[int, int]
    generator: torch.Generator

    @property
    def padding(self) -> tuple[int, int]:
        """Return p and q: an eighth of height and width, rounded half up, at most 4."""
        height, width = self.size
        return min((height + 4) // 8, 4), min((width + 4) // 8, 4)

    def draw(self, rows: Tensor) -> Tensor:
        """Return row numbers with a random variant in the bits from `ROW_BITS`."""
        p, q = self.padding
        variants = 2 * (2 * p + 1) * (2 * q + 1)
        return rows + (torch.randint(variants, rows.shape, generator=self.generator) << ROW_BITS)

    def variants(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Return the variants of images [B, channels, height, width] with these numbers [B]."""
        (height, width), (p, q) = self.size, self.padding
        place, flip = numbers[:, None] // 2, numbers[:, None] % 2 == 1
        down, right = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
        rows = (place // (2 * q + 1) + p) % (2 * p + 1) + down
        columns = (place % (2 * q + 1) + q) % (2 * q + 1) + torch.where(flip, right.flip(0), right)
        image, channel = (torch.arange(n, device=images.device) for n in images.shape[:2])
        return functional.pad(images, (q, q, p, p))[
            image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]
        ]


@dataclass(frozen=True, slots=True)
class Examples:
    """One client's examples of one split.

    Args:
        x: [n, ...] as stored (uint8, float32, or int64 tokens).
        y: classes [n] int64, or labels or values [n, T], see `Dataset`.
        scale, mean, std: normalisation of stored values (see `Dataset`).
        augment: draws and computes random variants of images; None: none.
    """

    x: Tensor
    y: Tensor
    scale: float = 255.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    augment: CropFlip | None = None

    def __len__(self) -> int:
        return self.y.shape[0]  # len of a tensor takes three times as long

    def vary(self, rows: Tensor) -> Tensor:
        """Return the row numbers of a training epoch, each with a random variant if examples are augmented."""
        return rows if self.augment is None else self.augment.draw(rows)

    def batch(self, index: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return the inputs [B, ...] (float32, or int64 tokens) and targets of rows, in the variants of `vary`."""
        if isinstance(index, Tensor):  # index_select is faster than x[index]: it copies whole rows
            index = index.to(self.y.device)
            rows = index if self.augment is None else index & ((1 << ROW_BITS) - 1)
            x, y = self.x.index_select(0, rows), self.y.index_select(0, rows)
            if self.augment is not None:
                x = self.augment.variants(x, index >> ROW_BITS)
        else:
            x, y = self.x[index], self.y[index]
        dtype = torch.float32 if x.dtype == torch.uint8 else x.dtype
        mean, std = (None if v is None else _constant(v, dtype, x.device) for v in (self.mean, self.std))
        return scaled(x, self.scale, mean, std), y

    def in_turn(self, size: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all examples in stored order, `size` at a time; None selects the best size for the device."""
        size = size or (FORWARD_BATCH["cuda"] if self.x.is_cuda else FORWARD_BATCH["cpu"])
        return (self.batch(slice(first, first + size)) for first in range(0, len(self), size))

    def to(self, device: torch.device | str) -> Examples:
        """Return a copy on a device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))


def scaled(x: Tensor, scale: float, mean: Tensor | None, std: Tensor | None) -> Tensor:
    """Return stored values as inputs: uint8 divided by `scale`, then standardised by channel or by pixel."""
    if x.dtype == torch.uint8:
        x = x.to(torch.float32).div_(scale)
    if mean is not None and std is not None:
        shape = (1, -1) + (1,) * (x.dim() - 2) if len(mean) == x.shape[1] else (1, *x.shape[1:])
        x = (x - mean.view(shape)) / std.view(shape)
    return x


@cache
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of these values, which is copied to a GPU only once."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Shard:
    """The examples of one client; `sets` are those of `eval.sets`; `weighs` is its `weight`, None for n_i."""

    client: int
    num_classes: int
    train: Examples
    val: Examples
    test: Examples
    sets: Mapping[str, Examples] = field(default_factory=dict)
    weighs: int | None = None

    @property
    def weight(self) -> int:
        """Return the client's weight in the mean of the models: n_i unless `task.weights_by` says otherwise."""
        return self.num_examples if self.weighs is None else self.weighs

    @property
    def num_examples(self) -> int:
        """Return the number of training examples, n_i."""
        return len(self.train)

    @property
    def all(self) -> Examples:
        """Return the examples of all splits."""
        parts = self.train, self.val, self.test
        return replace(self.test, x=torch.cat([part.x for part in parts]), y=torch.cat([part.y for part in parts]))

    def split(self, name: Split) -> Examples:
        """Return the examples of a split or a test set."""
        return self.sets[name] if name in self.sets else getattr(self, name)

    def to(self, device: torch.device) -> Shard:
        """Return a copy on a device."""
        return replace(self, train=self.train.to(device), val=self.val.to(device), test=self.test.to(device))


@dataclass(frozen=True, slots=True)
class StackedShards:
    """Training examples of several clients in one tensor. Those of client c begin at row `first[c]`."""

    examples: Examples
    first: dict[int, int]


def stacked_shards(shards: Sequence[Shard]) -> tuple[StackedShards, list[Shard]]:
    """Concatenate the training examples of some clients; return them, and shards whose training examples are slices."""
    parts = [own.train for own in shards]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    sizes = [own.num_examples for own in shards]
    slices = zip(shards, x.split(sizes), y.split(sizes), strict=True)
    sliced = [replace(own, train=replace(own.train, x=inputs, y=targets)) for own, inputs, targets in slices]
    first = {own.client: end - size for own, end, size in zip(shards, accumulate(sizes), sizes, strict=True)}
    return StackedShards(replace(parts[0], x=x, y=y), first), sliced


def shard(dataset: Dataset, partition: Partition, client: int) -> Shard:
    """Copy one client's rows of the data set into tensors, and shift them."""
    change = partition.shift.of(client)

    def take(rows: np.ndarray) -> Examples:
        x, y = change.inputs(dataset, rows), torch.from_numpy(change.labels(dataset, rows))
        return Examples(x, y, dataset.scale, dataset.mean, dataset.std)

    train, val, test = (take(rows[client]) for rows in (partition.train, partition.val, partition.test))
    return Shard(client, dataset.num_classes, train, val, test)


def names_of(dataset: Dataset, partition: Partition) -> tuple[str, ...]:
    """Return the name in the data of each client; () if a client's training rows are of several clients of the data."""
    if domains := domains_of(dataset, partition):
        return tuple(f"{name}-{domains[:client].count(name)}" for client, name in enumerate(domains))
    if dataset.clients is None:
        return ()
    found = [np.unique(dataset.clients[rows]).tolist() for rows in partition.train]
    numbers = {own[0] for own in found if len(own) == 1}
    if len(numbers) < len(found):
        return ()
    return tuple(dataset.client_names[own[0]] if dataset.client_names else str(own[0]) for own in found)


def domains_of(dataset: Dataset, partition: Partition) -> tuple[str, ...]:
    """Return the name of each client's domain; () if there are none, or a client has examples of several."""
    if not dataset.domains or dataset.clients is None:
        return ()
    found = [np.unique(dataset.clients[rows]) for rows in partition.train]
    return tuple(dataset.client_names[own[0]] for own in found) if max(map(len, found)) == 1 else ()


def class_counts(dataset: Dataset, partition: Partition, split: Split) -> np.ndarray:
    """Return the number of examples per client and class in a split, by shifted labels: [N, C] int64.

    The classes of other targets are those of `Dataset.by_class`.
    """
    dataset = dataset.by_class()
    labels = [partition.shift.of(i).labels(dataset, rows) for i, rows in enumerate(getattr(partition, split))]
    return np.stack([np.bincount(y, minlength=dataset.num_classes) for y in labels]).astype(np.int64)
