"""Fusion of adapters of different ranks: the definitions by NumPy, and what must hold."""

import numpy as np
import pytest
import torch
from torch import Tensor

from pflsim.fusion.adapters import Factors, decomposed_mean, padded_mean, product_norm, rank_axis

INPUTS, OUTPUTS = 7, 5


def pair(rank: int, seed: int = 0) -> Factors:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(rank, INPUTS))), torch.from_numpy(rng.normal(size=(OUTPUTS, rank)))


def shares(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


ONE = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[2.0], [0.0]]).double()
OTHER = torch.tensor([[0.0, 1.0], [1.0, 1.0]]).double(), torch.eye(2).double()


def test_numbers_of_hetlora() -> None:
    norms = shares(product_norm([ONE]), product_norm([OTHER]))
    weights = norms / norms.sum()
    np.testing.assert_allclose(weights, [0.535898, 0.464102], atol=1e-6)
    a, b = padded_mean([ONE, OTHER], weights, OTHER)
    np.testing.assert_allclose(a, [[0.535898, 0.464102], [0.464102, 0.464102]], atol=1e-6)
    np.testing.assert_allclose(b, [[1.535898, 0], [0, 0.464102]], atol=1e-6)


def test_numbers_of_flexlora() -> None:
    scale = 2.0  # of the adapters, by which U·Σ is divided, and which the sum has as a factor
    a, b = decomposed_mean([ONE, OTHER], shares(0.5, 0.5), OTHER)
    np.testing.assert_allclose(scale * b @ a, [[2, 1], [1, 1]], atol=1e-12)
    np.testing.assert_allclose(a[:1], [[0.850651, 0.525731]], atol=1e-6)
    np.testing.assert_allclose(b[:, :1], [[1.113516], [0.688191]], atol=1e-6)
    np.testing.assert_allclose(scale * b[:, :1] @ a[:1], [[1.894427, 1.170820], [1.170820, 0.723607]], atol=1e-6)


def test_the_norm_is_that_of_all_layers_together() -> None:
    layers = [pair(2, 1), pair(3, 2)]
    expected = np.linalg.norm(np.concatenate([(b @ a).numpy().ravel() for a, b in layers]))
    assert product_norm(layers) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 3, 4), (1, 1), (4, 4, 4)])
def test_a_truncated_decomposition_has_the_error_of_eckart_and_young(ranks: tuple[int, ...]) -> None:
    """Of every rank; it is exact from the rank of the sum on."""
    clients = [pair(rank, seed) for seed, rank in enumerate(ranks)]
    weights = shares(*range(1, len(ranks) + 1)) / sum(range(1, len(ranks) + 1))
    total = sum(float(w) * (b @ a).numpy() for (a, b), w in zip(clients, weights, strict=True))
    assert isinstance(total, np.ndarray)
    values = np.linalg.svd(total, compute_uv=False)
    a, b = decomposed_mean(clients, weights, pair(4, 9))
    for rank in range(1, 5):
        error = np.linalg.norm(total - (b[:, :rank] @ a[:rank]).numpy())
        assert error == pytest.approx(np.sqrt((values[rank:] ** 2).sum()), abs=1e-12)
    found = min(4, sum(ranks))
    np.testing.assert_allclose(a[:found] @ a[:found].T, np.eye(found), atol=1e-12)
    assert (a[:found].gather(1, a[:found].abs().argmax(1, keepdim=True)) > 0).all()


@pytest.mark.parametrize("fused", [padded_mean, decomposed_mean])
def test_rows_that_no_client_has_keep_their_values(fused: object) -> None:
    """Rows of zeros beside columns of zeros would never train again."""
    known = pair(4, 3)
    a, b = fused([pair(1, 1), pair(2, 2)], shares(0.25, 0.75), known)  # type: ignore[operator]
    first = 2 if fused is padded_mean else 3
    assert torch.equal(a[first:], known[0][first:]) and a.abs().sum(1).min() > 0
    assert torch.equal(b[:, first:], known[1][:, first:] if fused is padded_mean else torch.zeros(OUTPUTS, 1).double())


def test_vectors_of_singular_values_that_are_0_do_not_count() -> None:
    """They are rounding errors of the sum of two clients with the same two rows of A."""
    own, known = pair(2, 1), pair(4, 3)
    a, b = decomposed_mean([own, (own[0], pair(2, 2)[1])], shares(0.25, 0.75), known)
    assert torch.equal(a[2:], known[0][2:]) and not b[:, 2:].any()


@pytest.mark.parametrize("fused", [padded_mean, decomposed_mean])
def test_equal_clients_keep_their_product(fused: object) -> None:
    own = pair(3, 1)
    a, b = fused([own] * 3, shares(0.2, 0.3, 0.5), pair(3, 2))  # type: ignore[operator]
    np.testing.assert_allclose(b @ a, own[1] @ own[0], atol=1e-12)


def test_a_sum_of_zero_keeps_both_matrices() -> None:
    zero, known = (pair(2, 1)[0], torch.zeros(OUTPUTS, 2).double()), pair(3, 2)
    assert all(map(torch.equal, decomposed_mean([zero, zero], shares(0.5, 0.5), known), known))


def test_matrices_with_more_rows_than_the_layer_has_singular_values() -> None:
    own, known = pair(6, 1), pair(6, 2)
    a, b = decomposed_mean([own], shares(1.0), known)
    np.testing.assert_allclose(b @ a, own[1] @ own[0], atol=1e-12)
    assert torch.equal(a[5:], known[0][5:]) and not b[:, 5:].any()


@pytest.mark.parametrize(
    ("name", "axis"),
    [("net.body.fc1.lora_A.default.weight", 0), ("net.body.fc1.lora_B.default.weight", 1),
     ("net.body.fc1.lora_B.default.bias", None), ("net.head.weight", None)],
)  # fmt: skip
def test_where_the_rank_is(name: str, axis: int | None) -> None:
    assert rank_axis(name) == axis
