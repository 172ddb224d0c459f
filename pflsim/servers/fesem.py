"""The server of FeSEM: clusters of clients with similar models."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pflsim.config.settings import Count
from pflsim.config.validate import bounded
from pflsim.fusion.clusters import centre_distances, cluster_models, nearest
from pflsim.fusion.layerwise import flat_rows, stack
from pflsim.messages import Message, Uplink, packed
from pflsim.seeding import torch_generator
from pflsim.servers.base import Federation, ServerRule, memberships
from pflsim.types import Matrix, Tensors, Unit

CENTRE = "centre/"
"""Key prefix in messages to joining clients: centre/<k>/<key>."""


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        layout: the whole model as one unit; distances use its parameters.
        groups: [N] the cluster of each client.
        centres: the model of each cluster.
    """

    layout: tuple[Unit, ...]
    groups: Tensor
    centres: tuple[Tensors, ...]


class FeSEM(ServerRule[State]):
    """Multi-centre federated learning (Xie et al. 2020, Algorithm 1): k-means over the clients' models.

        E: r_i = argmin_k ‖w_i − c_k‖²        M: c_k ← mean of w_i over the clients with r_i = k

    Both steps run after each round, over the clients of the round.

    Args:
        groups: K, the number of clusters, 1 to N; 1 is FedAvg with equal weights.

    Notes:
        Clusters start as a random partition of the clients into equal parts. A client stays in its cluster if no centre
        is strictly nearer, so all clients stay in the first E step, when all centres are the initial model. A cluster
        without reporting clients keeps its centre. A client that does not report stays in its cluster and does not
        count in the centre. Running statistics are averaged within the cluster but do not count in distances. A client
        that joins later receives all centres and selects one by its own data.
    """

    unit = "model"

    def __init__(self, *, groups: Count = 3):
        self.groups = groups

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model as each centre and random clusters."""
        clients = len(federation.clients)
        bounded(f"clients={clients}, method.groups", self.groups, 1, clients)
        groups = torch.empty(clients, dtype=torch.int64)
        order = torch.randperm(clients, generator=torch_generator(federation.seed, "groups"))
        groups[order] = torch.arange(clients) % self.groups
        return State(federation.layouts["model"], groups, (dict(federation.initial),) * self.groups)

    def downlink(self, state: State, client: int) -> Message:
        """Send the centre of the client's cluster."""
        return Message(weights=state.centres[int(state.groups[client])])

    def join(self, state: State, client: int) -> Message:
        """Send all centres as `centre/<k>/<key>`; the client selects one."""
        return Message(extra=packed(dict(enumerate(state.centres)), CENTRE))

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Run the E step, then the M step."""
        if not uplinks:
            return state
        ids = torch.tensor([u.client for u in uplinks], dtype=torch.int64)
        sent, groups = [u.weights for u in uplinks], state.groups.clone()
        distances = torch.zeros(len(sent), self.groups, dtype=torch.float64)
        for key in (key for unit in state.layout for key in unit.parameters):
            distances += centre_distances(flat_rows(sent, key), flat_rows(state.centres, key))
        groups[ids] = nearest(distances, groups[ids])
        centres = cluster_models(sent, groups[ids], torch.ones(len(ids)), state.centres)
        return replace(state, groups=groups, centres=centres)

    def numbers(self, state: State) -> Tensors:
        """Return `groups` [N] and the centres `group/<key>` [K, *shape]."""
        return {"groups": state.groups} | {f"group/{key}": stack(state.centres, key) for key in state.centres[0]}

    def diagnostics(self, state: State) -> list[Matrix]:
        """Return who is in which cluster."""
        return memberships(state.groups, self.groups)
