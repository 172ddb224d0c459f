"""The server of IFCA: one model per cluster; the clients choose their cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pflsim.config.settings import Count
from pflsim.fusion.clusters import cluster_models
from pflsim.fusion.layerwise import stack
from pflsim.messages import Message, Uplink, packed
from pflsim.seeding import torch_generator
from pflsim.servers.base import Federation, ServerRule, memberships
from pflsim.types import Matrix, Tensors

MODEL, CLUSTER = "model/", "cluster"
"""Key prefix in downlinks, model/<j>/<key>, and the key of ĵ among an uplink's numbers."""


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        models: θ_j of each cluster.
        groups: [N] the cluster that each client chose last; −1 before it has reported.
    """

    models: tuple[Tensors, ...]
    groups: Tensor


class IFCA(ServerRule[State]):
    """θ_j ← Σ n_i/Σn · θ̃_i over the clients of the round with ĵ_i = j (Ghosh et al. 2020, Alg. 1, model averaging).

    Args:
        groups: M, the number of clusters; 1 is FedAvg.

    Notes:
        The first model starts with the run's initial values. Each other one has the same values, permuted at random
        within each tensor. This is another draw of values that are drawn independently within a tensor, and keeps
        constant ones. The paper's clients have equal numbers of examples; here they count, as in FedAvg. A cluster
        without reporting clients keeps its model.
    """

    def __init__(self, *, groups: Count = 3):
        self.groups = groups

    def init(self, federation: Federation) -> State:
        """Return the state with M different initial models."""
        generator = torch_generator(federation.seed, "groups")
        models = [dict(federation.initial)]
        for _ in range(1, self.groups):
            models.append({key: permuted(value, generator) for key, value in federation.initial.items()})
        return State(tuple(models), torch.full((len(federation.clients),), -1))

    def downlink(self, state: State, client: int) -> Message:
        """Send all models as `model/<j>/<key>`."""
        return Message(extra=packed(dict(enumerate(state.models)), MODEL))

    def downlinks(self, state: State, clients: Sequence[int]) -> dict[int, Message]:
        """Send the same message to all clients."""
        return dict.fromkeys(clients, self.downlink(state, -1))

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Average the models within each cluster, weighted by training examples."""
        if not uplinks:
            return state
        chosen = torch.tensor([int(u.numbers[CLUSTER]) for u in uplinks])
        examples = torch.tensor([u.num_examples for u in uplinks])
        sent, groups = [u.weights for u in uplinks], state.groups.clone()
        groups[[u.client for u in uplinks]] = chosen
        return State(cluster_models(sent, chosen, examples, state.models), groups)

    def numbers(self, state: State) -> Tensors:
        """Return `groups` [N] and the models `group/<key>` [M, *shape]."""
        return {"groups": state.groups} | {f"group/{key}": stack(state.models, key) for key in state.models[0]}

    def diagnostics(self, state: State) -> list[Matrix]:
        """Return who is in which cluster."""
        return memberships(state.groups, self.groups)


def permuted(value: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return a copy with its entries in random order; without a generator, from torch's global one."""
    return value.flatten()[torch.randperm(value.numel(), generator=generator)].view(value.shape)
