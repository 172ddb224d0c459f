"""The server of FedPAC: a mean body, global class means, and a mixture of heads for each client."""

from __future__ import annotations

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
        squares. L has the columns (√V_j·e_j, H_i − H_j), where the triangular factor of all H stands for them.
    """
    root, rows = torch.linalg.qr(means.flatten(1).T, mode="r").R, []  # columns with the products ⟨H_j, H_l⟩
    for own in root.T:
        bias = own[:, None] - root
        size = (variances + bias.square().sum(0)).mean()  # tr(P)/K
        size = torch.where(size > 0, size, 1.0)
        factor = torch.cat([(variances + RIDGE * size).sqrt().diag(), bias]) / size.sqrt()
        target = np.append(np.zeros(len(factor)), 1.0)
        weights, _ = nnls(np.vstack([factor, np.ones(len(variances))]), target)
        rows.append(torch.from_numpy(weights / weights.sum()))
    return torch.stack(rows)
