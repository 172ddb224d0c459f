"""The server of HetLoRA and FlexLoRA."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import MinLen

from pflsim.config.names import written
from pflsim.config.settings import Count
from pflsim.errors import SettingsError
from pflsim.fusion.adapters import decomposed_mean, padded_mean, product_norm, rank_axis
from pflsim.fusion.means import example_means
from pflsim.messages import Message, Uplink
from pflsim.servers.base import Federation, GlobalModelRule
from pflsim.types import Tensors


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        weights: the global model, with adapters of the largest rank.
    """

    weights: Tensors


class HetLoRA(GlobalModelRule[State]):
    """Fuses adapters of different ranks, and sends each client the first rows of A and columns of B, as its rank is.

    padding: A = Σ_k p_k·A_k and B = Σ_k p_k·B_k, padded with zeros, with p_k ∝ ‖B_kA_k‖ over all layers (HetLoRA).
    svd: A = Vᵀ and B = UΣ of the largest singular values of Σ_k w_k·B_kA_k, with w_k = n_k/n (FlexLoRA).

    Other tensors are averaged with the weights w_k.

    Args:
        ranks: of clients 0, 1, ..., and again from the first one on; the largest one is lora.r.
        aggregation: "padding" or "svd", as above.

    Notes:
        Clients whose norms are all 0 count equally. Rows that no client of the round has keep their values. A client
        that does not report does not count. A round without uplinks keeps the model.
    """

    def __init__(
        self,
        *,
        ranks: Annotated[Sequence[Count], MinLen(1)] = (4, 8, 16),
        aggregation: Literal["padding", "svd"] = "padding",
    ):
        self.ranks, self.aggregation = tuple(ranks), aggregation

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model."""
        most, given = max(self.ranks), f"method.ranks={written([*self.ranks])}"
        found = {len(value) for name, value in federation.initial.items() if rank_axis(name) == 0} - {most}
        if found:
            raise SettingsError(f"{given} needs lora.r={most}, the largest; found {min(found)}")
        if self.attackers and len({*self.ranks}) > 1:
            raise SettingsError(f"{given}: colluding attackers send one message, which needs one rank; set attack=none")
        return State(dict(federation.initial))

    def downlink(self, state: State, client: int) -> Message:
        """Send the global model with adapters of the client's rank."""
        return self.downlinks(state, [client])[client]

    def downlinks(self, state: State, clients: Sequence[int]) -> dict[int, Message]:
        """Send the same message to clients of the same rank."""
        ranks = {client: self.ranks[client % len(self.ranks)] for client in clients}
        messages = {rank: Message(weights=_first(state.weights, rank)) for rank in {*ranks.values()}}
        return {client: messages[rank] for client, rank in ranks.items()}

    def join(self, state: State, client: int) -> Message:
        """Send a newcomer what a client of its rank gets."""
        return self.downlink(state, client)

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Fuse the adapters of each layer, and average the other tensors."""
        if not uplinks:
            return state
        known, sent = state.weights, [up.weights for up in uplinks]
        pairs = [(name, name.replace("lora_A", "lora_B")) for name in known if rank_axis(name) == 0]
        wide = [{name: own[name].double().flatten(1) for pair in pairs for name in pair} for own in (known, *sent)]
        layers = [[(own[a], own[b]) for a, b in pairs] for own in wide]
        if self.aggregation == "svd":
            shares = torch.tensor([up.num_examples for up in uplinks], dtype=torch.float64)
        else:
            shares = torch.tensor([product_norm(own) for own in layers[1:]], dtype=torch.float64)
        shares = shares / shares.sum() if shares.any() else torch.full_like(shares, 1 / len(shares))
        fused = decomposed_mean if self.aggregation == "svd" else padded_mean
        weights = dict(known) | example_means(uplinks, [name for name in known if rank_axis(name) is None])
        for pair, old, *own in zip(pairs, *layers, strict=True):
            for name, value in zip(pair, fused(own, shares, old), strict=True):
                weights[name] = value.to(known[name].dtype).view_as(known[name])
        return State(weights)


def _first(weights: Tensors, rank: int) -> Tensors:
    """Return weights with the first rows of A and columns of B, so many as the rank says."""
    axes = {name: rank_axis(name) for name in weights}
    return {n: w if (axis := axes[n]) is None else w.narrow(axis, 0, rank).clone() for n, w in weights.items()}
