"""Robust aggregates, by hand, by brute force, and against ByzFL where it is installed."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from pflsim.fusion.robust import clipped_mean, geometric_median, krum, krum_scores, median, trimmed_mean

FIVE = torch.tensor([[0.0, 0], [1, 0], [0, 1], [1, 1], [9, 9]])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (median(FIVE), [1, 1]),
        (median(FIVE[:4]), [0.5, 0.5]),
        (trimmed_mean(FIVE, 1), [2 / 3, 2 / 3]),
        (krum_scores(FIVE, 1), [2, 2, 2, 2, 273]),
        (krum(FIVE, 1), [0, 0]),
        (krum(FIVE, 1, 4), [0.5, 0.5]),
        (clipped_mean(FIVE, 1.0), [(1 + math.sqrt(2)) / 5] * 2),
        (geometric_median(FIVE, 500), [(1 + 1 / math.sqrt(3)) / 2] * 2),
    ],
)
def test_by_hand(found: Tensor, expected: list[float]) -> None:
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def rows_of(n: int, seed: int = 0) -> Tensor:
    rows = torch.randn(n, 37, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows[: max(n // 4, 1)] += 20
    return rows


@pytest.mark.parametrize("n", [5, 6, 8])
def test_krum_is_the_least_sum_over_subsets_of_others(n: int) -> None:
    rows, f = rows_of(n), 1
    distances = (rows[:, None] - rows[None]).square().sum(-1).numpy()
    others = [[k for k in range(n) if k != i] for i in range(n)]
    expected = [min(distances[i, list(s)].sum() for s in combinations(others[i], n - f - 2)) for i in range(n)]
    assert krum_scores(rows, f).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("rows", [rows_of(9), [*rows_of(9).float()]])
def test_a_minority_cannot_move_the_result_far(rows: Tensor | list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of columns make no difference. A mean would be at 1e30."""
    benign = torch.stack([*rows[2:]]).double()
    given = [*rows]
    given[0], given[1] = torch.full_like(given[0], 1e30), torch.full_like(given[0], -1e30)
    for columns in (4096, 5):
        monkeypatch.setattr("pflsim.fusion.blocks.COLUMNS", columns)
        for found in (median(given), trimmed_mean(given, 2)):
            assert (benign.amin(0) <= found).all() and (found <= benign.amax(0)).all()
        for found in (krum(given, 2), krum(given, 2, 7), geometric_median(given, 10), clipped_mean(given, 1.0)):
            assert found.norm() < 2 * benign.norm(dim=1).max() and found.dtype == torch.float64
        assert torch.allclose(krum(given, 2, 7), benign.mean(0))


def test_clipping_around_the_last_aggregate() -> None:
    rows, centre = rows_of(8), torch.randn(37, generator=torch.Generator().manual_seed(1))
    expected = centre.double().numpy()
    for _ in range(3):
        differences = rows.numpy() - expected
        scale = np.minimum(1, 2 / np.linalg.norm(differences, axis=1, keepdims=True))
        expected = expected + (scale * differences).mean(0)
    assert np.allclose(clipped_mean(rows, 2.0, centre, 3), expected)
    assert torch.allclose(clipped_mean(rows, 1e9), rows.mean(0), rtol=1e-12)


def test_more_are_left_out_than_there_are() -> None:
    with pytest.raises(ValueError, match="more than 4"):
        trimmed_mean(FIVE[:4], 2)


@pytest.mark.parametrize(("n", "f"), [(5, 1), (8, 2), (11, 3), (20, 4)])
def test_as_byzfl(n: int, f: int) -> None:
    """Its Krum sums over one more distance than Blanchard et al. do."""
    byzfl = pytest.importorskip("byzfl")
    rows = rows_of(n, seed=n)
    close = dict(rtol=0, atol=1e-6)
    for ours, theirs in (
        (median(rows) if n % 2 else None, byzfl.Median()),
        (trimmed_mean(rows, f), byzfl.TrMean(f=f)),
        (krum(rows, f - 1), byzfl.Krum(f=f)),
        (krum(rows, f - 1, n - f), byzfl.MultiKrum(f=f)),
        (geometric_median(rows, 500), byzfl.GeometricMedian(nu=1e-6, T=500)),
        (clipped_mean(rows, 2.0, torch.zeros(37), 3), byzfl.CenteredClipping(L=3, tau=2.0)),
    ):
        if ours is not None:
            assert torch.allclose(ours, torch.as_tensor(theirs(rows)).double(), **close), theirs
