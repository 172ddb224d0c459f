"""The server of FeSEM: clusters of clients whose models are near."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pflsim.config.validate import at_least_one
from pflsim.errors import SettingsError
from pflsim.fusion.clusters import centre_distances, cluster_means, nearest
from pflsim.fusion.layerwise import column, flat_rows, stack
from pflsim.messages import Message, Uplink, packed
from pflsim.seeding import torch_generator
from pflsim.servers.base import Federation, ServerRule
from pflsim.types import Tensors, Unit

CENTRE = "centre/"
"""Tensors of a centre in a newcomer's message are centre/<k>/<key>."""


@dataclass(frozen=True, slots=True)
class State:
    """What the server keeps.

    Args:
        layout: everything that is fused, as one unit; its parameters decide distances.
        groups: [N] the cluster of every client.
        centres: the models of the clusters.
    """

    layout: tuple[Unit, ...]
    groups: Tensor
    centres: tuple[Tensors, ...]


class FeSEM(ServerRule[State]):
    """Multi-centre federated learning (Xie et al. 2020, Algorithm 1): k-means over the clients' models.

        E: r_i = argmin_k ‖w_i − c_k‖²        M: c_k ← mean of w_i over the clients with r_i = k

    over the clients of the round, after every round.

    Args:
        groups: K, 1 to N; 1 is FedAvg with equal weights.

    Notes:
        The clusters begin as a seeded random division of the clients into equal parts. A client that is as near to its
        centre as to any other stays; so do all in the first E step, when all centres are the common initial model. A
        cluster without members among the round's clients keeps its centre. A client that did not report stays in its
        cluster and does not count in the centre. Running statistics are averaged with their
        cluster but do not count in the distances. A newcomer is sent all centres and chooses by its own data.
    """

    unit = "model"

    def __init__(self, *, groups: int = 3):
        self.groups = at_least_one("method.groups", groups)

    def init(self, federation: Federation) -> State:
        """The common initial model as every centre, and the random division."""
        clients = len(federation.clients)
        if self.groups > clients:
            raise SettingsError(
                f"method.groups={self.groups} is more than the {clients} clients that train; give 1 to {clients}"
            )
        groups = torch.empty(clients, dtype=torch.int64)
        order = torch.randperm(clients, generator=torch_generator(federation.seed, "groups"))
        groups[order] = torch.arange(clients) % self.groups
        return State(federation.layouts["model"], groups, (dict(federation.initial),) * self.groups)

    def downlink(self, state: State, client: int) -> Message:
        """The centre of the client's cluster, one for all of the cluster."""
        return Message(weights=state.centres[int(state.groups[client])])

    def join(self, state: State, client: int) -> Message:
        """All centres as `centre/<k>/<key>`: a newcomer has no cluster yet, and chooses one."""
        del client
        return Message(extra=packed(dict(enumerate(state.centres)), CENTRE))

    def models_sent(self, joining: bool = False) -> int:
        """One centre; to a newcomer all of them."""
        return self.groups if joining else 1

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """E step, then M step."""
        if not uplinks:
            return state
        ids = torch.tensor([u.client for u in uplinks], dtype=torch.int64)
        sent, groups = [u.weights for u in uplinks], state.groups.clone()
        distances = torch.zeros(len(sent), self.groups, dtype=torch.float64)
        for key in (key for unit in state.layout for key in unit.parameters):
            distances += centre_distances(flat_rows(sent, key), flat_rows(state.centres, key))
        groups[ids] = nearest(distances, groups[ids])
        moved: list[dict[str, Tensor]] = [{} for _ in state.centres]
        for key in (key for unit in state.layout for key in unit.keys):
            means = cluster_means(column(sent, key), groups[ids], torch.ones(len(ids)), stack(state.centres, key))
            for centre, mean in zip(moved, means, strict=True):
                centre[key] = mean.clone()
        return replace(state, groups=groups, centres=tuple(moved))

    def numbers(self, state: State) -> Tensors:
        """`groups` [N], and the centres as `group/<key>` [K, *shape]."""
        return {"groups": state.groups} | {f"group/{key}": stack(state.centres, key) for key in state.centres[0]}
