"""The federated view of a data set: which client holds which rows, and a client's shard as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pflsim.data.dataset import Dataset
from pflsim.types import Split

AT_ONCE = {"cpu": 128, "cuda": 1024}
"""Examples per forward pass, by device: what a convolution makes of more leaves a CPU's cache."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Row numbers of the data set per client, one array per client and split, each sorted ascending."""

    train: tuple[np.ndarray, ...]
    val: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.train)


@dataclass(frozen=True, slots=True)
class Examples:
    """One client's examples of one split.

    Args:
        x: [n, ...] as stored (uint8 or float32).
        y: [n] int64.
        scale, mean, std: how stored values become inputs (see `Dataset`).
    """

    x: Tensor
    y: Tensor
    scale: float = 255.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The inputs [B, ...] float32 and labels [B] of the rows in `index`."""
        if isinstance(index, Tensor):  # copies whole rows, where x[index] copies numbers
            x, y = self.x.index_select(0, index.to(self.x.device)), self.y.index_select(0, index.to(self.y.device))
        else:
            x, y = self.x[index], self.y[index]
        if x.dtype == torch.uint8:
            x = x.to(torch.float32).div_(self.scale)
        if self.mean is not None and self.std is not None:
            shape = (1, -1) + (1,) * (x.dim() - 2)
            x = (x - x.new_tensor(self.mean).view(shape)) / x.new_tensor(self.std).view(shape)
        return x, y

    def in_turn(self, size: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples in their order, `size` at a time; None: as many as a forward pass takes best on their device."""
        size = size or (AT_ONCE["cuda"] if self.x.is_cuda else AT_ONCE["cpu"])
        return (self.batch(slice(first, first + size)) for first in range(0, len(self), size))

    def to(self, device: torch.device | str) -> Examples:
        """The same examples on a device."""
        return Examples(self.x.to(device), self.y.to(device), self.scale, self.mean, self.std)


@dataclass(frozen=True, slots=True)
class Shard:
    """Everything one client holds."""

    client: int
    num_classes: int
    train: Examples
    val: Examples
    test: Examples

    @property
    def num_examples(self) -> int:
        """Training examples, the n_i of the formulas."""
        return len(self.train)

    def split(self, name: Split) -> Examples:
        """The examples of a split by its name."""
        return {"train": self.train, "val": self.val, "test": self.test}[name]

    def to(self, device: torch.device) -> Shard:
        """The same shard on a device."""
        return replace(self, train=self.train.to(device), val=self.val.to(device), test=self.test.to(device))


@dataclass(frozen=True, slots=True)
class StackedShards:
    """Training examples of several clients in one piece: client c's begin at `first[c]`."""

    examples: Examples
    first: dict[int, int]


def stacked_shards(shards: Sequence[Shard]) -> tuple[StackedShards, list[Shard]]:
    """Lay the training examples of some clients out one after the other; each shard's become a part of them."""
    parts = [own.train for own in shards]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    first, diagnostics, at = {}, [], 0
    for own in shards:
        end = at + own.num_examples
        first[own.client] = at
        diagnostics.append(replace(own, train=replace(own.train, x=x[at:end], y=y[at:end])))
        at = end
    return StackedShards(replace(parts[0], x=x, y=y), first), diagnostics


def shard(dataset: Dataset, partition: Partition, client: int) -> Shard:
    """Copy one client's rows out of the data set as tensors of its own."""

    def take(rows: np.ndarray) -> Examples:
        x, y = torch.from_numpy(dataset.x[rows]), torch.from_numpy(dataset.y[rows])
        return Examples(x, y, dataset.scale, dataset.mean, dataset.std)

    return Shard(
        client,
        dataset.num_classes,
        take(partition.train[client]),
        take(partition.val[client]),
        take(partition.test[client]),
    )


def class_counts(dataset: Dataset, partition: Partition, split: Split) -> np.ndarray:
    """How many examples of each class every client holds in a split: [N, C] int64."""
    rows: tuple[np.ndarray, ...] = {"train": partition.train, "val": partition.val, "test": partition.test}[split]
    return np.stack([np.bincount(dataset.y[r], minlength=dataset.num_classes) for r in rows]).astype(np.int64)
