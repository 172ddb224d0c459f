"""The server of Floco: FedAvg on a simplex of heads, and a point of the simplex for each client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn.functional import pad

from pflsim.config.settings import Probability
from pflsim.fusion.means import example_means
from pflsim.messages import Message, Uplink
from pflsim.servers.base import Federation, GlobalModelRule
from pflsim.types import Tensors

ALPHA, UPDATE = "alpha", "endpoint_update"
"""Keys of α_i [M] in downlinks and of g_i [M, C, D] in replies to the survey, among the extra tensors."""
SMALLEST_SIZE, SIZES = 1e-4, 1000
"""The sizes z of the simplex that are tried are so many, evenly spaced from the smallest one to 1."""
SMALLEST_DISTANCE = 1e-4
"""Smaller distances between two clients' points count as this one."""


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        weights: the body, the endpoints and the bias.
        alphas: α_i [M] of each client that replied to the survey, by id; empty before it.
    """

    weights: Tensors
    alphas: Mapping[int, Tensor]


class Floco(GlobalModelRule[State]):
    """FedAvg of body, endpoints and bias, and a point α_i of the simplex for each client (Grinwald et al. 2024).

    Before round τ + 1 all clients train once more from the global model and send the update g_i of their endpoints.
    Nothing else is kept of this training. α_i is the projection of client i's first M principal components of the g.

    Args:
        endpoints: M; with 1, the method is FedAvg.
        warmup: τ as a fraction of the rounds, rounded half up; the authors: 0.5.

    Notes:
        A client that does not reply to the survey has no α_i and trains on the whole simplex.
    """

    def __init__(self, *, endpoints: int, warmup: Probability = 0.5):
        self.endpoints, self.warmup = endpoints, warmup

    def surveys(self, round_number: int, rounds: int) -> bool:
        """Return whether this is round τ + 1."""
        return self.endpoints > 1 and round_number == int(self.warmup * rounds + 0.5) + 1

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model."""
        return State(dict(federation.initial), {})

    def downlink(self, state: State, client: int) -> Message:
        """Send the global model, and α_i if there is one."""
        return Message(weights=state.weights, extra={ALPHA: state.alphas[client]} if client in state.alphas else {})

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Average the received models, weighted by training examples; after the survey, compute all α_i instead."""
        if updates := {u.client: u.extra[UPDATE] for u in uplinks if UPDATE in u.extra}:
            points = subregions(torch.stack([*updates.values()]).flatten(1), self.endpoints)
            own = next(iter(updates.values())).dtype
            return replace(state, alphas=dict(zip(updates, points.to(own).unbind(), strict=True)))
        return replace(state, weights=example_means(uplinks, state.weights)) if uplinks else state

    def numbers(self, state: State) -> Tensors:
        """Return α_i [M] of client i as `alpha/<i>`."""
        return {f"{ALPHA}/{client}": value for client, value in state.alphas.items()}


def subregions(updates: Float[Tensor, "K P"], endpoints: int) -> Float64[Tensor, "K M"]:
    """Project the updates of K clients onto the simplex of M = `endpoints` corners, far apart from each other.

    κ_i are the first M principal components of the updates; those beyond their rank are 0. For each size z, the points
    are the projections of κ_i onto the simplex of size z, divided by z. The z is chosen for which the Riesz energy
    log mean_{i<j} 1/‖b_i − b_j‖² is lowest; of equal ones, the smallest.

    Notes:
        The sign of a component is that for which the largest entry of its direction is positive.
    """
    centred = updates.double() - updates.double().mean(0)
    u, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
    signs = directions.gather(1, directions.abs().argmax(1, keepdim=True)).sign()
    components = (u * sizes * signs[:, 0])[:, :endpoints]
    kappa = pad(components, (0, endpoints - components.shape[1]))

    def energy(size: float) -> float:
        distances = torch.pdist(onto_simplex(kappa / size)).clamp(min=SMALLEST_DISTANCE)
        return float(distances.pow(-2).mean().log())

    tried = torch.linspace(SMALLEST_SIZE, 1, SIZES, dtype=torch.float64).tolist()
    return onto_simplex(kappa / min(tried, key=energy))


def onto_simplex(points: Float64[Tensor, "K M"]) -> Float64[Tensor, "K M"]:
    """Return the nearest points with entries that are not negative and sum to one, by sorting."""
    ordered = points.sort(1, descending=True).values
    excess = (ordered.cumsum(1) - 1) / torch.arange(1, points.shape[1] + 1)
    last = (ordered > excess).sum(1, keepdim=True) - 1
    return (points - excess.gather(1, last)).clamp(min=0)
