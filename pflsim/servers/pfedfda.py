"""The server of pFedFDA: means of bodies, class means and covariances."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pflsim.fusion.means import column, example_means, weighted_mean
from pflsim.messages import Message, Uplink
from pflsim.seeding import torch_generator
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors

MEANS, COVARIANCE = "class_means", "covariance"
"""Keys of μ [C, D] and of the lower triangle of Σ [D(D+1)/2] among the extra tensors of messages."""


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        weights: the body.
        gaussian: μ and Σ as `class_means` and `covariance`.
    """

    weights: Tensors
    gaussian: Tensors


class PFedFDA(ServerRule[State]):
    """θ, μ, Σ ← Σ n_i/n · (θ_i, μ_i, Σ_i) over the clients of a round (McLaughlin and Su 2024).

    Before round 1, the entries of μ are uniform in [0, 1) and Σ is the identity, as in the authors' program.

    Args:
        full_last_round: all clients take part in the last round, as in the authors' program.
    """

    def __init__(self, *, full_last_round: bool = False):
        self.full_last_round = full_last_round

    def full_participation(self, round_number: int, rounds: int) -> bool:
        """Return whether this is the last round, if all clients take part in it."""
        return self.full_last_round and round_number == rounds

    def init(self, federation: Federation) -> State:
        """Return the state with the initial body and Gaussian."""
        width, generator = federation.feature_width, torch_generator(federation.seed, "class_means")
        means = torch.rand(federation.num_classes, width, generator=generator).to(federation.dtype)
        covariance = lower_triangle(torch.eye(width, dtype=federation.dtype))
        return State(dict(federation.initial), {MEANS: means, COVARIANCE: covariance})

    def downlink(self, state: State, client: int) -> Message:
        """Send the body and the Gaussian."""
        return Message(weights=state.weights, extra=state.gaussian)

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Average bodies and Gaussians, weighted by training examples."""
        if not uplinks:
            return state
        sent, examples = [u.extra for u in uplinks], torch.tensor([u.num_examples for u in uplinks])
        gaussian = {key: weighted_mean(column(sent, key), examples) for key in state.gaussian}
        return State(example_means(uplinks, state.weights), gaussian)


def lower_triangle(matrix: Float[Tensor, "D D"]) -> Float[Tensor, " T"]:
    """Return the lower triangle of a symmetric matrix, row by row; T = D(D+1)/2."""
    rows, columns = torch.tril_indices(*matrix.shape)
    return matrix[rows, columns]


def symmetric(triangle: Float[Tensor, " T"], width: int) -> Float[Tensor, "D D"]:
    """Return the symmetric matrix [width, width] with this lower triangle."""
    rows, columns = torch.tril_indices(width, width)
    matrix = triangle.new_zeros(width, width)
    matrix[rows, columns] = matrix[columns, rows] = triangle
    return matrix
