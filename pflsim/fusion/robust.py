"""Aggregates of clients' changes that a minority of arbitrary changes cannot move far, accumulated in float64.

K rows of P values are one change per client, over all parameters; f is the number of malicious clients that is assumed.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float64
from torch import Tensor

from pflsim.fusion.attentive import squared_distances
from pflsim.fusion.blocks import Rows, blocks

NEAREST = 1e-6
"""The least distance of a row to the geometric median: at 0 its weight would be infinite."""


def median(rows: Rows) -> Float64[Tensor, " P"]:
    """Return the median of each value; of an even number of rows the mean of the middle two."""
    return trimmed_mean(rows, (len(rows) - 1) // 2)


def trimmed_mean(rows: Rows, f: int) -> Float64[Tensor, " P"]:
    """Return the mean of each value without the f lowest and the f highest, as in Yin et al. (2018).

    Raises:
        ValueError: none is left.
    """
    if 2 * f >= len(rows):
        raise ValueError(f"expected more than {2 * f} rows, to leave out {f} at each end; got {len(rows)}")
    return _by_block(rows, lambda block: block.sort(dim=0).values[f : len(block) - f].mean(dim=0))


def krum_scores(rows: Rows, f: int) -> Float64[Tensor, " K"]:
    """Return the sum of each row's squared distances to the K − f − 2 nearest others, at least one of them.

    Blanchard et al. (2017), "Machine learning with adversaries: Byzantine tolerant gradient descent".
    """
    others = squared_distances(rows).fill_diagonal_(torch.inf).sort(dim=1).values
    return others[:, : max(len(rows) - f - 2, 1)].sum(dim=1)


def krum(rows: Rows, f: int, chosen: int = 1) -> Float64[Tensor, " P"]:
    """Return the mean of the rows with the lowest `krum_scores`; of equal ones the first count (Multi-Krum).

    Args:
        rows: [K, P] or K rows.
        f: malicious clients.
        chosen: the number of rows.
    """
    best = krum_scores(rows, f).argsort(stable=True)[:chosen].sort().values
    return _by_block(rows, lambda block: block[best.to(block.device)].mean(dim=0))


def geometric_median(rows: Rows, steps: int) -> Float64[Tensor, " P"]:
    """Return the point with the least sum of distances to the rows, by Weiszfeld's algorithm from the `median`.

    Pillutla et al. (2022), "Robust aggregation for federated learning".

    Args:
        rows: [K, P] or K rows.
        steps: of the algorithm. It does not start at 0, where a client that changes nothing would hold it.
    """
    found = median(rows)
    for _ in range(steps):
        weights = 1 / distances_to(rows, found).clamp_min(NEAREST)
        found = _by_block(rows, lambda block: (weights / weights.sum()).to(block.device) @ block)  # noqa: B023
    return found


def clipped_mean(rows: Rows, bound: float, centre: Tensor | None = None, steps: int = 1) -> Float64[Tensor, " P"]:
    """Return the centre plus the mean of the rows' differences to it, each clipped to a Euclidean norm.

    Karimireddy et al. (2021), "Learning from history for Byzantine robust optimization"; without a centre, the bound of
    norms of Sun et al. (2019).

    Args:
        rows: [K, P] or K rows.
        bound: the largest norm.
        centre: [P]; None: 0.
        steps: how often; each begins at the result of the one before.
    """
    found = torch.zeros_like(rows[0], dtype=torch.float64) if centre is None else centre.double()
    for _ in range(steps):
        scales = (bound / distances_to(rows, found).clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1)
        mean = _by_block(rows, lambda block: scales.to(block.device) @ block) / len(rows)  # noqa: B023
        found = found + mean - scales.mean() * found
    return found


def distances_to(rows: Rows, point: Float64[Tensor, " P"]) -> Float64[Tensor, " K"]:
    """Return the Euclidean distance of each row to a point."""
    squares, start = torch.zeros(len(rows), dtype=torch.float64, device=point.device), 0
    for block in blocks(rows):
        own = point[start : start + block.shape[1]]
        squares, start = squares + (block - own).square().sum(dim=1), start + block.shape[1]
    return squares.sqrt()


def _by_block(rows: Rows, reduce: Callable[[Tensor], Tensor]) -> Float64[Tensor, " P"]:
    """Return what a function makes of each block of columns, joined."""
    return torch.cat([reduce(block) for block in blocks(rows)])
