"""Learned mixing weights: rows sum to one, and gradients against NumPy and finite differences."""

import numpy as np
import pytest
import torch

from pflsim.fusion.blocks import COLUMNS
from pflsim.fusion.mixing_weights import largest_own, mixing_gradient, mixing_weights

SCORES = torch.tensor(np.random.default_rng(0).normal(size=(3, 2, 4)), dtype=torch.float64)
RECEIVERS = [3, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax(dtype: torch.dtype) -> None:
    found = mixing_weights(SCORES.to(dtype), RECEIVERS, "softmax")
    powers = np.exp(SCORES.to(dtype).double().numpy())
    np.testing.assert_allclose(found.numpy(), powers / powers.sum(2, keepdims=True), rtol=1e-13)
    torch.testing.assert_close(found.sum(2), torch.ones(3, 2, dtype=torch.float64), rtol=0, atol=1e-15)


def test_relu() -> None:
    scores = SCORES + 0.5
    found = mixing_weights(scores, RECEIVERS, "relu")
    clipped = np.maximum(scores.numpy(), 0)
    assert (clipped == 0).any() and (clipped.sum(2) > 0).all()
    np.testing.assert_allclose(found.numpy(), clipped / clipped.sum(2, keepdims=True), rtol=1e-14)
    torch.testing.assert_close(found.sum(2), torch.ones(3, 2, dtype=torch.float64), rtol=0, atol=1e-15)


def test_relu_with_nothing_above_zero_is_the_receiver_itself() -> None:
    scores = SCORES.clone()
    scores[0, 1] = torch.tensor([-1.0, 0.0, -2.0, -0.5])
    scores[1] = 0.0
    scores.requires_grad_()
    found = mixing_weights(scores, RECEIVERS, "relu")
    assert found[0, 1].tolist() == [0, 0, 0, 1]
    assert found[1].tolist() == [[1, 0, 0, 0]] * 2
    (gradient,) = torch.autograd.grad((found * torch.randn(4)).sum(), scores)
    assert gradient.isfinite().all() and not gradient[1].any()
    assert gradient[2].any()


@pytest.mark.parametrize("width", [7, COLUMNS + 5])
def test_gradient_is_that_of_half_the_squared_distance(width: int) -> None:
    rng = np.random.default_rng(1)
    alpha, stack, targets = rng.dirichlet(np.ones(4), 3), rng.normal(size=(4, width)), rng.normal(size=(3, width))
    found = mixing_gradient(*map(torch.from_numpy, (alpha, stack, targets))).numpy()
    np.testing.assert_allclose(found, (alpha @ stack - targets) @ stack.T, rtol=1e-11)


def test_gradient_keeps_the_digits_that_count() -> None:
    """Clients differ by a millionth of their size: products in float32 would lose the differences between them."""
    rng = np.random.default_rng(2)
    common = rng.normal(size=50_000)
    stack = (common + 1e-5 * rng.normal(size=(4, 50_000))).astype(np.float32)
    targets = (common + 1e-5 * rng.normal(size=(1, 50_000))).astype(np.float32)
    alpha = np.full((1, 4), 0.25)
    mixture = (alpha @ stack.astype(np.float64)).astype(np.float32)  # as it is sent
    exact = (mixture.astype(np.float64) - targets) @ stack.astype(np.float64).T
    found = mixing_gradient(*map(torch.from_numpy, (alpha, stack, targets))).numpy()
    spread = exact - exact.mean()
    np.testing.assert_allclose(found - found.mean(), spread, rtol=1e-6, atol=1e-9 * np.abs(spread).max())
    single = (mixture - targets) @ stack.T
    assert np.abs(single - single.mean() - spread).max() > 1e-3 * np.abs(spread).max()


def test_the_units_with_the_largest_own_weight() -> None:
    alpha = torch.zeros(2, 4, 3, dtype=torch.float64)
    alpha[0, :, 2] = torch.tensor([0.1, 0.4, 0.4, 0.2], dtype=torch.float64)
    alpha[0, :, 1] = torch.tensor([0.9, 0.0, 0.0, 0.8], dtype=torch.float64)  # weight on another does not count
    alpha[1, :, 0] = torch.tensor([0.3, 0.3, 0.3, 0.3], dtype=torch.float64)
    expected = {0: [[], []], 1: [[1], [0]], 2: [[1, 2], [0, 1]], 3: [[1, 2, 3], [0, 1, 2]], 4: [[0, 1, 2, 3]] * 2}
    for count, rows in expected.items():
        found = largest_own(alpha, [2, 0], count)
        assert found.dtype == torch.bool
        assert [row.nonzero().flatten().tolist() for row in found] == rows
