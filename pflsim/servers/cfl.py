"""The server of CFL: FedAvg in clusters that are divided by the cosines of their clients' updates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pflsim.config.settings import CountOrZero
from pflsim.config.validate import NonNegative
from pflsim.fusion.clusters import Linkage, bipartition, cosine_similarity, update_products
from pflsim.fusion.layerwise import stack
from pflsim.fusion.means import example_means
from pflsim.messages import Message, Uplink, packed
from pflsim.servers.base import Federation, ServerRule, memberships
from pflsim.servers.fesem import CENTRE
from pflsim.types import Matrix, Tensors


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        parameters: names of the tensors that updates consist of.
        fused: the rounds so far, including those without uplinks.
        groups: [N] the cluster of each client.
        models: W_c of each cluster.
        norms: [K, 2] ‖Σ w_iΔ_i‖ and max ‖Δ_i‖ of each cluster when it was last averaged; 0 before. The two parts of a
            cluster that has been divided begin with those of the whole.
    """

    parameters: tuple[str, ...]
    fused: int
    groups: Tensor
    models: tuple[Tensors, ...]
    norms: Tensor


class CFL(ServerRule[State]):
    """Clustered federated learning (Sattler, Müller, Samek 2021).

    All clients are one cluster at first, and all take part in every round. With Δ_i = w_i − W_c, a cluster c is divided
    in two by the cosines of Δ_i and Δ_j if

        ‖Σ w_i·Δ_i‖ < ε₁,    max ‖Δ_i‖ > ε₂,    |c| ≥ 3,    and the round is later than `after`.

    Then each cluster, or part of one, takes its mean: W ← W_c + Σ w_i·Δ_i, where w_i = n_i/Σn over its own clients.

    Args:
        eps1: ε₁ ≥ 0, in the unit of the weights; with 0 the method is FedAvg.
        eps2: ε₂ ≥ 0, in the same unit.
        after: rounds before the first division.
        linkage: of the agglomerative clustering with the distances 1 − cos, see `bipartition`: "complete", as in the
            authors' program, or "single", the bipartition of the paper.

    Notes:
        The paper's second criterion for a division, by √((1 − α)/2) > γ, is not in the authors' program nor here. Both
        norms are over the parameters; running statistics are averaged within the cluster. A cluster that lacks the
        reply of a client is averaged and not divided; one without replies keeps its model. The part of the client with
        the lowest id keeps the cluster's number, the other one gets the next free number. A client that joins later
        receives all models and selects one by its own data; the paper's walk down the tree needs two exchanges.
    """

    unit = "model"

    def __init__(
        self,
        *,
        eps1: NonNegative = 0.4,
        eps2: NonNegative = 1.6,
        after: CountOrZero = 20,
        linkage: Linkage = "complete",
    ):
        self.eps1, self.eps2, self.after = eps1, eps2, after
        self.linkage: Linkage = linkage

    def full_participation(self, round_number: int, rounds: int) -> bool:
        """Return True: a division needs the updates of all clients of a cluster."""
        return True

    def init(self, federation: Federation) -> State:
        """Return the state with all clients in one cluster."""
        parameters = tuple(key for unit in federation.layouts["model"] for key in unit.parameters)
        groups, norms = torch.zeros(len(federation.clients), dtype=torch.int64), torch.zeros(1, 2, dtype=torch.float64)
        return State(parameters, 0, groups, (dict(federation.initial),), norms)

    def downlink(self, state: State, client: int) -> Message:
        """Send the model of the client's cluster."""
        return Message(weights=state.models[int(state.groups[client])])

    def join(self, state: State, client: int) -> Message:
        """Send all models as `centre/<k>/<key>`; the client selects one."""
        return Message(extra=packed(dict(enumerate(state.models)), CENTRE))

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Divide the clusters for which it is due, then average within each cluster."""
        groups, models, norms = state.groups.clone(), list(state.models), list(state.norms)
        for number, received in enumerate(state.models):
            members = [u for u in uplinks if state.groups[u.client] == number]
            if not members:
                continue
            gram = update_products([u.weights for u in members], received, state.parameters)
            examples = torch.tensor([u.num_examples for u in members], dtype=torch.float64)
            shares = examples / examples.sum()
            mean, largest = (shares @ gram @ shares).clamp(min=0).sqrt(), gram.diagonal().max().sqrt()
            norms[number] = torch.stack((mean, largest))
            whole = len(members) == int((state.groups == number).sum()) >= 3
            if whole and state.fused >= self.after and mean < self.eps1 and largest > self.eps2:
                second = bipartition(cosine_similarity(gram), self.linkage).bool()
                groups[[u.client for u, other in zip(members, second, strict=True) if other]] = len(models)
                models.append(received)
                norms.append(norms[number])
        for number, received in enumerate(models):
            members = [u for u in uplinks if groups[u.client] == number]
            models[number] = example_means(members, received) if members else received
        return replace(state, fused=state.fused + 1, groups=groups, models=tuple(models), norms=torch.stack(norms))

    def numbers(self, state: State) -> Tensors:
        """Return `groups` [N], `norms` [K, 2] and the models `group/<key>` [K, *shape]."""
        models = {f"group/{key}": stack(state.models, key) for key in state.models[0]}
        return {"groups": state.groups, "norms": state.norms, **models}

    def diagnostics(self, state: State) -> list[Matrix]:
        """Return who is in which cluster."""
        return memberships(state.groups, len(state.models))
