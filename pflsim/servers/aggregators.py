"""What a server makes of the changes that clients send, in place of their mean weighted by training examples."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Protocol

import torch
from annotated_types import Ge, Le, Lt
from jaxtyping import Float64
from torch import Tensor

from pflsim.config.validate import Positive
from pflsim.fusion.means import uniform_mean
from pflsim.fusion.robust import clipped_mean, geometric_median, krum, median, trimmed_mean
from pflsim.types import Tensors

Minority = Annotated[float, Ge(0), Lt(0.5)]
Steps = Annotated[int, Ge(1), Le(10_000)]


class Aggregator:
    """Base class of aggregators of changes. It is itself `aggregator=none`."""

    def __call__(self, changes: Sequence[Tensors], memory: Tensors) -> tuple[Tensors, Tensors]:
        """Return the change of the server's model, and what the server keeps for the next round.

        Args:
            changes: of the shared tensors of K ≥ 1 clients, in float64, by ascending client id. Must not be modified.
            memory: what it kept in the round before; {} before round 1.
        """
        raise NotImplementedError


class MakesAggregator(Protocol):
    """Type of an aggregator with its settings bound."""

    def __call__(self) -> Aggregator:
        """Return the aggregator."""
        ...


def none() -> Aggregator:
    """Take the mean weighted by training examples, or what else the method takes."""
    return Aggregator()


class RowAggregator(Aggregator, ABC):
    """Base class of aggregators that see a client's change as one row."""

    def __call__(self, changes: Sequence[Tensors], memory: Tensors) -> tuple[Tensors, Tensors]:
        """Join the tensors of each client, and split the result."""
        rows = [torch.cat([value.flatten() for value in change.values()]) for change in changes]
        found, memory = self.aggregate(rows, memory)
        parts = found.split([value.numel() for value in changes[0].values()])
        pairs = zip(changes[0].items(), parts, strict=True)
        return {name: part.view(value.shape) for (name, value), part in pairs}, memory

    @abstractmethod
    def aggregate(self, rows: Sequence[Tensor], memory: Tensors) -> tuple[Float64[Tensor, " P"], Tensors]:
        """Return the aggregate of K rows [P], and the new memory."""


class Mean(RowAggregator):
    """Mean of the changes, in which every client counts the same."""

    def aggregate(self, rows: Sequence[Tensor], memory: Tensors) -> tuple[Tensor, Tensors]:
        """Return the mean."""
        return uniform_mean(rows), memory


class Median(RowAggregator):
    """Median of each value (Yin et al. 2018)."""

    def aggregate(self, rows: Sequence[Tensor], memory: Tensors) -> tuple[Tensor, Tensors]:
        """Return the medians."""
        return median(rows), memory


class MinorityAggregator(RowAggregator, ABC):
    """Base class of aggregators that assume a share of malicious clients."""

    def __init__(self, *, share: Minority = 0.2):
        self.share = share

    def malicious(self, clients: int) -> int:
        """Return the number of malicious clients in a round that is assumed."""
        return math.floor(self.share * clients + 1e-9)  # 0.3 · 10 is below 3


class TrimmedMean(MinorityAggregator):
    """Mean of each value without the lowest and highest ones (Yin et al. 2018).

    Args:
        share: of the clients that are left out at each end, in [0, 0.5); the number is rounded down.
    """

    def aggregate(self, rows: Sequence[Tensor], memory: Tensors) -> tuple[Tensor, Tensors]:
        """Return the means."""
        return trimmed_mean(rows, self.malicious(len(rows))), memory


class Krum(MinorityAggregator):
    """Change of the client that is closest to its nearest others (Blanchard et al. 2017).

    Args:
        share: of malicious clients that is assumed, in [0, 0.5); the number is rounded down.
    """

    def aggregate(self, rows: Sequence[Tensor], memory: Tensors) -> tuple[Tensor, Tensors]:
        """Return the change with the lowest score."""
        return krum(rows, self.malicious(len(rows))), memory


class MultiKrum(Krum):
    """Mean of the changes that are closest to their nearest others: of all clients but the malicious ones.

    Args:
        share: of malicious clients that is assumed, in [0, 0.5); the number is rounded down.
    """

    def aggregate(self, rows: Sequence[Tensor], memory: Tensors) -> tuple[Tensor, Tensors]:
        """Return the mean of the changes with the lowest scores."""
        f = self.malicious(len(rows))
        return krum(rows, f, len(rows) - f), memory


class GeometricMedian(RowAggregator):
    """Point with the least sum of distances to the changes (Pillutla et al. 2022).

    Args:
        steps: of Weiszfeld's algorithm, which starts at the median of each value.
    """

    def __init__(self, *, steps: Steps = 10):
        self.steps = steps

    def aggregate(self, rows: Sequence[Tensor], memory: Tensors) -> tuple[Tensor, Tensors]:
        """Return the point."""
        return geometric_median(rows, self.steps), memory


class NormBound(RowAggregator):
    """Mean of the changes, each scaled down to a norm (Sun et al. 2019).

    Args:
        bound: the largest norm of a change, above 0.
    """

    def __init__(self, *, bound: Positive = 1.0):
        self.bound = bound

    def aggregate(self, rows: Sequence[Tensor], memory: Tensors) -> tuple[Tensor, Tensors]:
        """Return the mean."""
        return clipped_mean(rows, float(self.bound)), memory


class CenteredClipping(RowAggregator):
    """Last aggregate plus the mean of the differences to it, each scaled down to a norm (Karimireddy et al. 2021).

    Args:
        bound: the largest norm of a difference, above 0.
        steps: how often per round.
    """

    def __init__(self, *, bound: Positive = 10.0, steps: Steps = 1):
        self.bound, self.steps = bound, steps

    def aggregate(self, rows: Sequence[Tensor], memory: Tensors) -> tuple[Tensor, Tensors]:
        """Return the new aggregate, which is also kept."""
        found = clipped_mean(rows, float(self.bound), memory.get("last"), self.steps)
        return found, {"last": found}
