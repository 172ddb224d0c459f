"""The server of FedPAC: a mean body, global class means, and a mixture of heads for each client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from scipy.optimize import nnls
from torch import Tensor

from pflsim.config.validate import Chance
from pflsim.fusion.attentive import mix
from pflsim.fusion.means import column, example_means
from pflsim.fusion.prototypes import fuse_prototypes, keep_missing
from pflsim.messages import Message, Prototypes, Uplink
from pflsim.servers.base import Federation, ServerRule, between_clients
from pflsim.types import Matrix, Tensors

HEAD = "net.head."
"""Prefix of the head's keys."""
VARIANCE, WEIGHTED_MEANS = "variance", "weighted_means"
"""Key of V_i among an uplink's numbers, and of H_i [C, D] among its extra tensors."""
RIDGE = 1e-12
"""Added to the diagonal of each P, times the mean of its diagonal."""
COLUMNS = 64
"""Clients among which the search for a client's mixing weights begins."""
PRECISION = 1e-13
"""Slopes of the objective, divided by tr(P)/K, that count as 0."""


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        weights: the body.
        heads: the mixed head of each client that has reported, by id.
        means: the global class means c; None before the first report.
        mixing: α [N, N] float64 of the last round, receivers as rows; 0 for clients without a report.
    """

    weights: Tensors
    heads: Mapping[int, Tensors]
    means: Prototypes | None
    mixing: Tensor


class FedPAC(ServerRule[State]):
    """θ ← Σ n_i/n · θ_i, c_k ← Σ n_ik·c_ik / Σ n_ik, φ_i ← Σ_j α_ij·φ_j over the clients of a round (Xu et al. 2023).

    α_i minimises the sum of variance and bias Σ_j α_ij²·V_j + ‖Σ_j α_ij·(H_i − H_j)‖² of client i's head over weights
    α_i ≥ 0 that sum to one.

    Args:
        min_weight: α_ij below it are 0, but not the largest of a row, and the others of the row are scaled; the
            authors' program: 0.001.

    Notes:
        A class that no client of the round holds keeps its mean. A client that does not report keeps its head.
    """

    def __init__(self, *, min_weight: Chance = 0.001):
        self.min_weight = min_weight

    def init(self, federation: Federation) -> State:
        """Return the state with the initial body."""
        clients = len(federation.clients)
        body = {key: value for key, value in federation.initial.items() if not key.startswith(HEAD)}
        return State(body, {}, None, torch.zeros(clients, clients, dtype=torch.float64))

    def downlink(self, state: State, client: int) -> Message:
        """Send the body, the client's mixed head if it has one, and the global class means."""
        return Message(weights={**state.weights, **state.heads.get(client, {})}, prototypes=state.means)

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Average bodies and class means, and mix the heads."""
        if not uplinks:
            return state
        ids, sent = [u.client for u in uplinks], [u.weights for u in uplinks]
        variances = torch.tensor([u.numbers[VARIANCE] for u in uplinks], dtype=torch.float64)
        alpha = self.mixing_weights(variances, torch.stack([u.extra[WEIGHTED_MEANS].double() for u in uplinks]))
        mixed = {key: mix(alpha, column(sent, key)) for key in sent[0] if key.startswith(HEAD)}
        heads = {client: {key: rows[at] for key, rows in mixed.items()} for at, client in enumerate(ids)}
        means = keep_missing(fuse_prototypes([u.prototypes for u in uplinks if u.prototypes]), state.means)
        mixing = torch.zeros_like(state.mixing)
        mixing[torch.tensor(ids)[:, None], torch.tensor(ids)] = alpha
        return State(example_means(uplinks, state.weights), {**state.heads, **heads}, means, mixing)

    def mixing_weights(self, variances: Float64[Tensor, " K"], means: Float64[Tensor, "K C D"]) -> Tensor:
        """Return α [K, K] of K clients with V and H, receivers as rows, without small weights."""
        alpha = head_weights(variances, means)
        alpha = alpha.where((alpha >= self.min_weight) | (alpha == alpha.amax(1, keepdim=True)), 0.0)
        return alpha / alpha.sum(1, keepdim=True)

    def numbers(self, state: State) -> Tensors:
        """Return `alpha` [N, N]."""
        return {"alpha": state.mixing}

    def diagnostics(self, state: State) -> Sequence[Matrix]:
        """Return α."""
        return between_clients(self.numbers(state), "alpha", "Weights of the clients' heads in each mixed head")


def head_weights(variances: Float64[Tensor, " K"], means: Float64[Tensor, "K C D"]) -> Float64[Tensor, "K K"]:
    """Return for each client i the α_i ≥ 0 with Σ_j α_ij = 1 that minimises αᵀP_iα.

    P_i = diag(V) + G_i with G_i[j, l] = ⟨H_i − H_j, H_i − H_l⟩.

    Args:
        variances: V.
        means: H.

    Notes:
        With P = LᵀL, α is proportional to the x ≥ 0 that minimises ‖Lx‖² + (Σx − 1)², a problem of non-negative least
        squares. L has the columns (√V_j·e_j, H_i − H_j), where the triangular factor of all H stands for them. Since
        most α_ij are 0, the problem has the columns of `COLUMNS` clients at first, those with the smallest P_jj, and
        then also those that would lower the minimum, at most doubling their number each time.
    """
    flat = means.flatten(1)
    root = torch.linalg.qr((flat - flat.mean(0)).T, mode="r").R  # columns with the products ⟨H_j, H_l⟩
    v, products, root = variances.numpy(), (root.T @ root).numpy(), root.numpy()
    found, squares = np.zeros(products.shape), products.diagonal()
    for i in range(len(v)):
        near, alpha = products[i], found[i]
        diagonal = v + squares - 2 * near + squares[i]
        size = diagonal.mean() if diagonal.mean() > 0 else 1.0  # tr(P)/K
        raised = v + RIDGE * size
        chosen = new = np.sort(np.argsort(diagonal, kind="stable")[:COLUMNS])
        while len(new):
            factor = np.vstack([np.diag(np.sqrt(raised[chosen])), root[:, i, None] - root[:, chosen]]) / np.sqrt(size)
            weights, _ = nnls(np.vstack([factor, np.ones(len(chosen))]), np.append(np.zeros(len(factor)), 1.0))
            alpha[chosen] = weights / weights.sum()
            slopes = raised * alpha + (products[:, chosen] * alpha[chosen]).sum(1) - near  # Pα, but for a constant
            lower = slopes - (alpha * slopes).sum()
            lower[chosen] = 0.0
            new = np.argsort(lower, kind="stable")[: len(chosen)]
            new = new[lower[new] < -PRECISION * size]
            chosen = np.union1d(chosen, new)
    return torch.from_numpy(found)
