"""Attentive mixing against NumPy in float64, and its properties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pflsim.errors import SettingsError
from pflsim.fusion import attentive
from pflsim.fusion.attentive import attention_weights, check_self_weight, squared_distances
from pflsim.fusion.blocks import COLUMNS

FLATS = hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 7)), elements=st.floats(-100, 100, width=32))


def mix(zeta: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
    return torch.stack(attentive.mix(zeta, stack))


def reference_distances(flat: np.ndarray) -> np.ndarray:
    rows = flat.astype(np.float64)
    return ((rows[:, None] - rows[None]) ** 2).sum(-1)


def reference_weights(distances: np.ndarray, alpha: float, sigma: float) -> np.ndarray:
    """pFedCFR eq. 10, entry by entry."""
    clients = len(distances)
    zeta = np.zeros((clients, clients))
    for n in range(clients):
        for m in range(clients):
            if m != n:
                zeta[n, m] = alpha * math.exp(-distances[n, m] / sigma) / sigma
        zeta[n, n] = 1 - zeta[n].sum()
    return zeta


@pytest.mark.parametrize("width", [1, 5, COLUMNS, COLUMNS + 1, 2 * COLUMNS + 7])
def test_distances_golden(width: int) -> None:
    flat = np.random.default_rng(0).normal(size=(5, width)).astype(np.float32)
    distances = squared_distances(torch.from_numpy(flat))
    assert distances.dtype == torch.float64
    np.testing.assert_allclose(distances.numpy(), reference_distances(flat), rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_distances_of_near_twins_keep_their_digits(dtype: type) -> None:
    """Far from zero and from the third client, two clients differ in the last digits only."""
    flat = np.full((3, 1000), 1000.0, dtype=dtype)
    flat[1] = np.nextafter(flat[1], dtype(2000))
    flat[2] = -1000
    distances = squared_distances(torch.from_numpy(flat)).numpy()
    step = float(np.spacing(dtype(1000)))
    assert distances[0, 1] == pytest.approx(1000 * step**2, rel=1e-12)
    np.testing.assert_allclose(distances, reference_distances(flat), rtol=1e-12)


@given(FLATS, st.randoms(use_true_random=False))
def test_distances_are_symmetric_and_follow_a_permutation_to_the_bit(flat: np.ndarray, random) -> None:
    rows = torch.from_numpy(flat)
    order = list(range(len(rows)))
    random.shuffle(order)
    distances = squared_distances(rows)
    assert torch.equal(distances, distances.T)
    assert torch.equal(distances.diagonal(), torch.zeros(len(rows), dtype=torch.float64))
    assert torch.equal(squared_distances(rows[order]), distances[order][:, order])
    assert (distances >= 0).all()


def test_weights_golden() -> None:
    distances = reference_distances(np.random.default_rng(2).normal(size=(6, 4)))
    zeta = attention_weights(torch.from_numpy(distances), alpha=0.7, sigma=5.0)
    np.testing.assert_allclose(zeta.numpy(), reference_weights(distances, 0.7, 5.0), rtol=1e-12)


@given(FLATS, st.floats(0, 50), st.floats(1e-3, 1e6))
def test_clamped_weights_are_row_stochastic(flat: np.ndarray, load: float, sigma: float) -> None:
    zeta = attention_weights(squared_distances(torch.from_numpy(flat)), alpha=load * sigma, sigma=sigma)
    assert (zeta >= 0).all()
    torch.testing.assert_close(zeta.sum(1), torch.ones(len(flat), dtype=torch.float64), rtol=0, atol=1e-12)


def test_clamp_by_hand() -> None:
    """Rows 0 and 1 are twins, whose self weights 1 − 1.5 − 1.5/e² are cut to zero; row 2 stays as it is."""
    distances = torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 2.0], [2.0, 2.0, 0.0]], dtype=torch.float64)
    near, far = 1.5, 1.5 * math.exp(-2)
    zeta = attention_weights(distances, alpha=1.5, sigma=1.0)
    total = near + far
    expected = [[0, near / total, far / total], [near / total, 0, far / total], [far, far, 1 - 2 * far]]
    torch.testing.assert_close(zeta, torch.tensor(expected, dtype=torch.float64))


def test_check_self_weight() -> None:
    check_self_weight(20, 0.0, 1e6)
    check_self_weight(101, 1e4, 1e6)
    check_self_weight(500, 1e4, 1e6, clamp=True)
    check_self_weight(1, 1e9, 1.0)
    bound = r"\(N-1\)\*alpha/sigma <= 1; N=102, alpha=10000, sigma=1e\+06 give 1\.01\. "
    message = bound + r"Use method.alpha <= 9900\.99.*clamp"
    with pytest.raises(SettingsError, match=message):
        check_self_weight(102, 1e4, 1e6)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 2), (COLUMNS + 5,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("receivers", [3, 4])
def test_mix_golden(shape: tuple[int, ...], dtype: torch.dtype, receivers: int) -> None:
    rng = np.random.default_rng(3)
    stack = torch.from_numpy(rng.normal(size=(4, *shape))).to(dtype)
    zeta = rng.dirichlet(np.ones(4), size=receivers)
    mixed = mix(torch.from_numpy(zeta), stack)
    assert mixed.dtype == dtype
    expected = np.einsum("rn,n...->r...", zeta, stack.double().numpy())
    torch.testing.assert_close(mixed, torch.from_numpy(expected).to(dtype))


def test_identical_clients_stay_identical() -> None:
    stack = torch.randn(50, generator=torch.Generator().manual_seed(0)).expand(7, 50)
    zeta = attention_weights(squared_distances(stack), alpha=1.0, sigma=10.0)
    assert torch.equal(mix(zeta, stack), stack)


def test_one_client_is_identity_to_the_bit() -> None:
    stack = torch.randn(1, 33, dtype=torch.float64)
    zeta = attention_weights(squared_distances(stack), alpha=1.0, sigma=1.0)
    assert torch.equal(mix(zeta, stack), stack)
