"""Means of tensors and of prototypes against NumPy in float64, and their properties."""

import inspect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pflsim.fusion.means import uniform_mean, weighted_mean
from pflsim.fusion.prototypes import fuse_prototypes
from pflsim.messages import Prototypes

SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, max_side=4)
SINGLE = st.floats(-1e3, 1e3, width=32)
STACKS = SHAPES.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=SINGLE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 2)])
def test_golden(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    stack = torch.from_numpy(rng.normal(size=(4, *shape))).to(dtype)
    weights = np.array([600.0, 20.0, 35.0, 1.0])
    expected = np.tensordot(weights / weights.sum(), stack.double().numpy(), axes=1)
    mean = weighted_mean(stack, torch.from_numpy(weights))
    assert mean.dtype == dtype
    assert mean.shape == shape
    torch.testing.assert_close(mean, torch.from_numpy(np.asarray(expected)).to(dtype))


def test_uniform_golden() -> None:
    stack = np.random.default_rng(1).normal(size=(5, 3))
    np.testing.assert_allclose(uniform_mean(torch.from_numpy(stack)).numpy(), stack.mean(0), rtol=1e-14)


def test_a_list_need_not_be_stacked_and_the_mean_may_be_of_another_type() -> None:
    stack = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([3, 1, 2, 5])
    assert torch.equal(weighted_mean(list(stack), weights), weighted_mean(stack, weights))
    wide = weighted_mean(list(stack), weights, torch.float64)
    expected = np.average(stack.double().numpy(), axis=0, weights=weights.numpy())
    np.testing.assert_allclose(wide.numpy(), expected, rtol=1e-14)
    assert torch.equal(uniform_mean(list(stack), torch.float64), uniform_mean(stack.double()))


def test_accumulates_in_float64() -> None:
    """In float32 the small terms would vanish beside the large one."""
    stack = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)])
    assert uniform_mean(stack).item() == 0.5


@given(hnp.arrays(np.float32, SHAPES, elements=st.floats(width=32, allow_nan=False)), st.floats(1e-300, 1e300))
def test_one_client_is_identity_to_the_bit(values: np.ndarray, weight: float) -> None:
    tensor, weights = torch.from_numpy(values), torch.tensor([weight], dtype=torch.float64)
    assert torch.equal(weighted_mean(tensor[None], weights), tensor)
    assert torch.equal(weighted_mean(tensor[None].double() / 3, weights), tensor.double() / 3)


@given(STACKS, st.integers(1, 5))
def test_identical_clients_stay_identical(values: np.ndarray, clients: int) -> None:
    tensor = torch.from_numpy(values)
    weights = torch.arange(1, clients + 1, dtype=torch.float64) / 3
    assert torch.equal(weighted_mean(torch.stack([tensor] * clients), weights), tensor)


@pytest.mark.parametrize(
    "weights", [[0.0, 0.0], [1.0, -0.5], [1.0, float("nan")], [float("nan"), 1.0], [1.0, float("inf")]]
)
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be finite, not negative, and not all zero"):
        weighted_mean(torch.zeros(2, 3), torch.tensor(weights, dtype=torch.float64))


def test_integer_counters_are_refused() -> None:
    plain = inspect.unwrap(weighted_mean)  # without the tests' own type checks, which would refuse them too
    with pytest.raises(TypeError, match="cannot be averaged"):
        plain(torch.tensor([1, 2]), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("weighting", ["samples", "uniform", "printed"])
def test_class_by_class_over_those_who_hold_it(weighting: str) -> None:
    rng = np.random.default_rng(1)
    means, counts = rng.normal(size=(5, 4, 3)), rng.integers(0, 4, size=(5, 4))
    counts[:, 2] = 0  # a class that nobody holds
    means[counts == 0] = np.nan  # the row of a missing class means nothing
    sent = [Prototypes(torch.from_numpy(m), torch.from_numpy(c)) for m, c in zip(means, counts, strict=True)]
    fused = fuse_prototypes(sent, weighting)  # type: ignore[arg-type]
    for j in range(4):
        total, weight = np.zeros(3), 0.0
        for i in range(5):
            if counts[i, j] > 0:
                w = 1 if weighting == "uniform" else counts[i, j]
                total, weight = total + w * means[i, j], weight + w
        assert int(fused.counts[j]) == counts[:, j].sum()
        if weighting == "printed":  # 1/|ℵ_j| too (pFedPM eq. 7)
            weight *= (counts[:, j] > 0).sum()
        if weight:
            np.testing.assert_allclose(fused.means[j].numpy(), total / weight, rtol=1e-12)
    assert torch.isfinite(fused.means).all()
