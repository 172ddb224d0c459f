"""Cosines, Ward's clustering and means within clusters, against NumPy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from pflsim.fusion.blocks import COLUMNS
from pflsim.fusion.clusters import (
    centre_distances,
    cluster_means,
    cosine_similarity,
    directions,
    nearest,
    ward_clusters,
)
from pflsim.fusion.layerwise import layer_weights, mix_layer


def gram(vectors: np.ndarray) -> Tensor:
    return torch.from_numpy(vectors @ vectors.T)


def ward(points: np.ndarray, clusters: int) -> set[frozenset[int]]:
    """Ward's method as defined: join the two clusters whose union adds least to the sum of squares within clusters."""

    def spread(members: frozenset[int]) -> float:
        inside = points[sorted(members)]
        return float(((inside - inside.mean(0)) ** 2).sum())

    parts = {frozenset([i]) for i in range(len(points))}
    while len(parts) > clusters:
        pairs = [(a, b) for a in parts for b in parts if min(a) < min(b)]
        a, b = min(pairs, key=lambda p: spread(p[0] | p[1]) - spread(p[0]) - spread(p[1]))
        parts = parts - {a, b} | {a | b}
    return parts


def as_parts(labels: Tensor) -> set[frozenset[int]]:
    return {frozenset((labels == m).nonzero()[:, 0].tolist()) for m in labels.unique().tolist()}


def test_cosines_golden() -> None:
    vectors = np.random.default_rng(0).normal(size=(6, 9)) * np.array([1e-6, 1e3, 1, 1, 2, 7])[:, None]
    found = cosine_similarity(gram(vectors)).numpy()
    for i in range(6):
        for j in range(6):
            a, b = vectors[i], vectors[j]
            expected = (a * b).sum() / (np.sqrt((a * a).sum()) * np.sqrt((b * b).sum()))
            np.testing.assert_allclose(found[i, j], expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(found, found.T)


def test_cosines_stay_within_their_range_and_a_zero_vector_has_none() -> None:
    vectors = np.array([[0.1, 0.7], [0.1 * 3, 0.7 * 3], [-0.1, -0.7], [0.0, 0.0]])
    found = cosine_similarity(gram(vectors))
    assert found.abs().max() <= 1
    np.testing.assert_allclose(found[0, :3].numpy(), [1, 1, -1], rtol=1e-15)
    assert found[3].tolist() == found[:, 3].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("clusters", range(1, 13))
def test_ward_golden(clusters: int) -> None:
    """The same parts as Ward's criterion gives on the vectors themselves, scaled to length 1, or on their angles."""
    vectors = np.random.default_rng(1).normal(size=(12, 4))
    directions = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = cosine_similarity(gram(vectors))
    labels = ward_clusters(similarity, clusters)
    assert as_parts(labels) == ward(directions, clusters)
    assert list(dict.fromkeys(labels.tolist())) == list(range(clusters)), "numbered by their first members"
    angles = np.arccos(np.clip(directions @ directions.T, -1, 1))
    np.fill_diagonal(angles, 0)
    assert as_parts(ward_clusters(similarity, clusters, "angles")) == ward(angles, clusters)


def test_ward_gives_as_many_clusters_as_asked_though_all_are_alike() -> None:
    for clusters in range(1, 6):
        assert len(ward_clusters(torch.ones(5, 5), clusters).unique()) == clusters
    assert ward_clusters(torch.ones(1, 1), 1).tolist() == [0]


def test_cluster_means_golden() -> None:
    rng = np.random.default_rng(2)
    stack, weights = rng.normal(size=(6, 2, 3)), np.array([5.0, 1, 2, 9, 4, 3])
    labels, otherwise = np.array([2, 0, 2, 3, 0, 2]), rng.normal(size=(4, 2, 3))
    found = cluster_means(*map(torch.from_numpy, (stack, labels, weights, otherwise))).numpy()
    for m, members in {0: [1, 4], 2: [0, 2, 5], 3: [3]}.items():
        expected = sum(weights[k] * stack[k] for k in members) / sum(weights[k] for k in members)
        np.testing.assert_allclose(found[m], expected, rtol=1e-13)
    np.testing.assert_array_equal(found[1], otherwise[1])
    np.testing.assert_array_equal(found[3], stack[3])


def test_who_is_in_no_cluster_counts_nowhere() -> None:
    stack, labels = torch.tensor([1.0, 100.0, 3.0]), torch.tensor([1, -1, 1])
    assert cluster_means(stack, labels, torch.ones(3), torch.tensor([7.0, 8.0])).tolist() == [7, 2]
    assert cluster_means([], labels[:0], torch.ones(0), torch.tensor([7.0, 8.0])).tolist() == [7, 8]


def test_directions_golden() -> None:
    """Over more than a block of columns, and nothing that was given is changed."""
    rng = np.random.default_rng(5)
    rows, others, origin = (
        rng.normal(size=(3, COLUMNS + 7)),
        rng.normal(size=(2, COLUMNS + 7)),
        rng.normal(size=COLUMNS + 7),
    )
    given = [torch.from_numpy(a.copy()) for a in (rows, others, origin)]
    products, squares = directions(*given)
    np.testing.assert_allclose(products.numpy(), (rows - origin) @ (others - origin).T, rtol=1e-11)
    np.testing.assert_allclose(squares.numpy(), ((others - origin) ** 2).sum(1), rtol=1e-11)
    assert all(np.array_equal(t.numpy(), a) for t, a in zip(given, (rows, others, origin), strict=True))


def test_layer_weights_golden() -> None:
    norms = np.abs(np.random.default_rng(3).normal(size=(4, 5)))
    norms[2] = 0
    found = layer_weights(torch.from_numpy(norms), 0.6).numpy()
    for m in (0, 1, 3):
        np.testing.assert_allclose(found[m], [0.6 * d / max(norms[m]) for d in norms[m]], rtol=1e-14)
        assert found[m].max() == pytest.approx(0.6)
    assert not found[2].any()


def test_mixed_layer_golden() -> None:
    rng = np.random.default_rng(4)
    own, common, psi = rng.normal(size=(3, 2, 4)), rng.normal(size=(2, 4)), np.array([0.0, 0.3, 1.0])
    found = mix_layer(*map(torch.from_numpy, (own, common, psi))).numpy()
    for m in range(3):
        np.testing.assert_allclose(found[m], psi[m] * own[m] + (1 - psi[m]) * common, rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(found[0], common)
    np.testing.assert_array_equal(found[2], own[2])


def test_a_model_mixed_with_itself_is_itself() -> None:
    common = torch.randn(50, generator=torch.Generator().manual_seed(0))
    psi = torch.linspace(0, 1, 7)
    assert all(torch.equal(row, common) for row in mix_layer(common.expand(7, 50), common, psi))


def test_centre_distances_golden() -> None:
    """Also where the rows are longer than a block of columns, and nearly equal."""
    rng = np.random.default_rng(8)
    rows, centres = rng.normal(size=(4, COLUMNS + 7)), rng.normal(size=(3, COLUMNS + 7))
    rows[1] = centres[2] + 1e-9
    found = centre_distances(torch.from_numpy(rows), torch.from_numpy(centres)).numpy()
    np.testing.assert_allclose(found, ((rows[:, None] - centres[None]) ** 2).sum(-1), rtol=1e-6)
    single = centre_distances(torch.from_numpy(rows).float(), torch.from_numpy(centres).float())
    assert single.dtype == torch.float64


def test_nearest() -> None:
    """The nearest one; on a tie, and for what is not finite, the current one."""
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[3.0, 1, 2], [1, 1, 2], [1, 1, 2], [2, 1, 1], [nan, nan, nan], [inf, inf, inf]])
    assert nearest(rows, torch.tensor([0, 1, 2, 0, 2, 1])).tolist() == [1, 1, 0, 1, 2, 1]
