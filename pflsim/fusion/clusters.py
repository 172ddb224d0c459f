"""Clusters of clients and means within clusters. Sums use float64, in the given order."""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Num, Shaped
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.spatial.distance import pdist
from torch import Tensor

from pflsim.fusion.blocks import Rows, Workspace, blocks
from pflsim.fusion.layerwise import flat_rows
from pflsim.fusion.means import Stack, column, weighted_mean
from pflsim.types import Tensors

Groups = Float[Tensor, " M P"] | Sequence[Float[Tensor, " P"]]
"""One flattened tensor of M clusters: [M, P], or a list of M rows."""
ClusterOn = Literal["directions", "angles"]
"""What is clustered, see `ward_clusters`."""
Linkage = Literal["complete", "single"]
"""How far apart two sets of vectors are, see `bipartition`."""


def update_products(sent: Sequence[Tensors], received: Tensors, keys: Iterable[str]) -> Float64[Tensor, " K K"]:
    """Return the inner products `⟨Δ_i, Δ_j⟩` of the updates `Δ_i = w_i − W` of K clients.

    Args:
        sent: w_i, the clients' tensors by name.
        received: W, the same tensors before local training.
        keys: the tensors that count, in blocks of columns.
    """
    gram = torch.zeros(len(sent), len(sent), dtype=torch.float64)
    for key in keys:
        for after, before in zip(blocks(flat_rows(sent, key)), blocks(flat_rows([received], key)), strict=True):
            update = after.sub_(before)
            gram.addmm_(update, update.T)
    return gram


def cosine_similarity(gram: Float[Tensor, " K K"]) -> Float[Tensor, " K K"]:
    """Return the cosines between K vectors from their inner products.

    FedALP eqs. 3 and 4: `ρ_ij = ⟨Δ_i, Δ_j⟩ / (‖Δ_i‖·‖Δ_j‖)`

    Args:
        gram: [K, K] inner products.

    Returns:
        [K, K] float64 in [−1, 1], symmetric, with 1 on the diagonal. The cosine of a zero vector with others is 0.
    """
    gram = gram.double()
    norms = gram.diagonal().sqrt()
    scale = torch.where(norms > 0, 1 / norms, torch.zeros_like(norms))
    similarity = (gram * scale[:, None] * scale[None, :]).clamp(-1, 1)
    return ((similarity + similarity.T) / 2).fill_diagonal_(1)


def ward_clusters(similarity: Float[Tensor, " N N"], clusters: int, on: ClusterOn = "directions") -> Int[Tensor, " N"]:
    """Cut Ward's hierarchical clustering of N vectors into exactly M clusters.

    FedALP Algorithm 2, lines 1 and 2.

    Args:
        similarity: [N, N] cosines, symmetric.
        clusters: M, 1 to N.
        on: the points that are clustered: "directions", the vectors scaled to length 1, or "angles", for each vector
            its N angles to all vectors.

    Returns:
        [N] int64, the cluster of each vector: 0 to M−1, numbered by first members.

    Raises:
        ValueError: a similarity is not finite.

    Notes:
        Ward's method needs Euclidean distances. Vectors scaled to length 1 have the distance √(2 − 2ρ).
    """
    n = similarity.shape[0]
    if not similarity.isfinite().all():
        raise ValueError("similarities must be finite, but training diverged: use a lower lr")
    if n == 1:
        return torch.zeros(1, dtype=torch.int64)
    rho = similarity.double().numpy()
    distances = np.sqrt(np.clip(2 - 2 * rho, 0, None))[np.triu_indices(n, k=1)]
    tree = linkage(pdist(np.arccos(rho)) if on == "angles" else distances, method="ward")
    return _cut(tree, clusters)


def bipartition(similarity: Float[Tensor, " N N"], method: Linkage = "complete") -> Int[Tensor, " N"]:
    """Divide N ≥ 2 vectors into two groups by agglomerative clustering with the distances 1 − ρ.

    CFL (Sattler et al. 2021): the authors' program has complete linkage. Single linkage minimises the largest cosine
    between the groups, as the paper's optimal bipartition does.

    Args:
        similarity: ρ [N, N], cosines, symmetric.
        method: the distance of two sets is that of their farthest ("complete") or nearest ("single") vectors.

    Returns:
        [N] int64, 0 for the group of the first vector, else 1.
    """
    distances = (1 - similarity.double()).numpy()[np.triu_indices(len(similarity), k=1)]
    return _cut(linkage(distances, method=method), 2)


def _cut(tree: np.ndarray, clusters: int) -> Int[Tensor, " N"]:
    """Cut a tree of SciPy into clusters, numbered by their first members."""
    labels = cut_tree(tree, n_clusters=clusters)[:, 0].tolist()
    order = {label: rank for rank, label in enumerate(dict.fromkeys(labels))}
    return torch.tensor([order[label] for label in labels], dtype=torch.int64)


def cluster_means(
    stack: Stack, labels: Int[Tensor, " K"], weights: Num[Tensor, " K"], otherwise: Shaped[Tensor, " M *shape"]
) -> Float[Tensor, " M *shape"]:
    """Average K clients' tensors within M clusters.

    `mean_m = Σ_{k∈G_m} (p_k / Σ_{j∈G_m} p_j) · stack_k`

    Args:
        stack: [K, *shape], or a list of K tensors.
        labels: [K], the cluster of each client, 0 to M−1; clients with a negative label are ignored.
        weights: [K] weights p; only their ratios within a cluster matter.
        otherwise: [M, *shape], the values of clusters without members.

    Returns:
        [M, *shape] in the dtype of `otherwise`, accumulated in float64.
    """
    means = otherwise.clone()
    for m in labels[labels >= 0].unique().tolist():
        inside = labels == m
        members = [stack[k].to(means.dtype) for k in inside.nonzero()[:, 0].tolist()]
        means[m] = weighted_mean(members, weights[inside])
    return means


def cluster_models(
    sent: Sequence[Tensors], labels: Int[Tensor, " K"], weights: Num[Tensor, " K"], otherwise: Sequence[Tensors]
) -> tuple[dict[str, Tensor], ...]:
    """Average K clients' models within M clusters, see `cluster_means`; no two tensors share memory.

    Args:
        sent: K clients' tensors by name.
        labels: [K], the cluster of each client.
        weights: [K], of the clients.
        otherwise: the models of clusters without members.
    """
    models: list[dict[str, Tensor]] = [{} for _ in otherwise]
    for key in otherwise[0]:
        means = cluster_means(column(sent, key), labels, weights, torch.stack(column(otherwise, key)))
        for model, mean in zip(models, means, strict=True):
            model[key] = mean.clone()
    return tuple(models)


def centre_distances(rows: Rows, centres: Groups) -> Float64[Tensor, " N M"]:
    """Return the squared Euclidean distances of N rows to M centres.

    FeSEM, E step: `d_nm = ‖w_n − c_m‖²`

    Args:
        rows: [N, P] or N rows, one flattened unit per client; distances of several tensors may be added.
        centres: [M, P] or M rows, the same unit per cluster.

    Returns:
        [N, M] float64. Differences are computed before squaring, in blocks of columns.
    """
    distances = torch.zeros(len(rows), len(centres), dtype=torch.float64, device=rows[0].device)
    differences = Workspace(len(rows), len(rows[0]), torch.float64, distances.device)
    for block, centre_block in zip(blocks(rows), blocks(centres), strict=True):
        for m, centre in enumerate(centre_block):
            distances[:, m] += torch.sub(block, centre, out=differences.columns(block.shape[1])).square_().sum(1)
    return distances


def directions(
    rows: Rows, others: Groups, origin: Float[Tensor, " P"]
) -> tuple[Float64[Tensor, " N M"], Float64[Tensor, " M"]]:
    """Return the inner products of N with M vectors and the squared norms of the M, relative to an origin.

    `products_nm = ⟨w_n − o, w_m − o⟩`, `squares_m = ‖w_m − o‖²`

    Args:
        rows: [N, P] or N rows, one flattened tensor each; results of several tensors may be added.
        others: [M, P] or M rows.
        origin: [P].

    Returns:
        [N, M] and [M], float64, computed in blocks of columns.
    """
    products = torch.zeros(len(rows), len(others), dtype=torch.float64, device=rows[0].device)
    squares = torch.zeros(len(others), dtype=torch.float64, device=rows[0].device)
    for own, other, start in zip(blocks(rows), blocks(others), blocks([origin]), strict=True):
        other.sub_(start)
        products.addmm_(own.sub_(start), other.T)
        squares += other.square().sum(1)
    return products, squares


def nearest(distances: Float[Tensor, " K M"], current: Int[Tensor, " K"]) -> Int[Tensor, " K"]:
    """Choose the nearest of M clusters for each of K clients.

    FeSEM, E step: `r_k = argmin_m d_km`

    Args:
        distances: [K, M].
        current: [K], the current cluster of each client.

    Returns:
        [K] int64. The current cluster is kept if no other is strictly nearer, or if distances are not finite.
    """
    smallest, best = distances.min(1)
    return torch.where(distances.gather(1, current[:, None])[:, 0] > smallest, best, current)
