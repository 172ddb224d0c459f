"""The server of FedALP: FedAvg, then client groups with a layer-wise mixture of group model and global model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pflsim.config.settings import Count, Probability
from pflsim.config.validate import Share, bounded
from pflsim.errors import SettingsError
from pflsim.fusion.blocks import blocks
from pflsim.fusion.clusters import (
    ClusterOn,
    cluster_means,
    cosine_similarity,
    directions,
    update_products,
    ward_clusters,
)
from pflsim.fusion.layerwise import flat_rows, layer_weights, mix_layer, stack
from pflsim.fusion.means import column, example_means, weighted_mean
from pflsim.messages import Message, Uplink
from pflsim.params import UnitKind
from pflsim.servers.base import Federation, GlobalModelRule, memberships
from pflsim.types import Axis, Matrix, Tensors, Unit


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        examples: [N] the training examples of each client.
        layout: the L fusion units.
        warmup: T_pre.
        fused: the rounds so far, including those without uplinks.
        weights: w_g.
        groups: [N] the group of each client, −1 for none; [0] during the warm-up.
        psi: Ψ [M, L]; [0, L] during the warm-up.
        models: w_m of each group; empty during the warm-up.
        mixtures: W_m of each group; empty during the warm-up.
    """

    examples: Tensor
    layout: tuple[Unit, ...]
    warmup: int
    fused: int
    weights: Tensors
    groups: Tensor
    psi: Tensor
    models: tuple[Tensors, ...]
    mixtures: tuple[Tensors, ...]


class FedALP(GlobalModelRule[State]):
    """Adaptive layer-based personalisation (Xie et al. 2022, Algorithms 1 and 2).

    Rounds 1 to T_pre are FedAvg. After round T_pre the server clusters the clients into M groups by the cosines of
    their updates (eqs. 3, 4). It computes a weight Ψ for each layer of a group from the norm of the group's mean update
    (eqs. 5 to 8). In later rounds it sends group m the mixture W_m = Ψ_m·w_m + (1 − Ψ_m)·w_g (eq. 9) and updates

        w_m ← W_m + Σ_{k∈G_m} γ_k·(w_k − W_m),    w_g ← Σ_m Γ_m·w_m

    Args:
        groups: M, the number of client groups, 1 to N.
        beta: β in [0, 1], the weight of the most personal layer; the paper: 0.6.
        warmup: T_pre as a fraction of the rounds, in (0, 1); the paper: 0.4 to 0.7.
        unit: the fusion unit: module, tensor or model.
        delta: the measure δ of an update in a layer: "norm" (eq. 7), or "per_entry", the norm divided by the number of
            the layer's parameters.
        gamma: "group", γ_k are fractions of the examples of the group's participants, or "all", of those of all N
            clients (Table 1 of the paper).
        onto: the model that the update is added to: "mixture", W_m, which MixByLayer has put in the place of w_m, or
            "group", w_m, as line 10 of Algorithm 1 reads.
        cluster_on: what Ward's method clusters, see `ward_clusters`: "directions" or "angles".

    Notes:
        Γ_m are the fractions of the examples of all grouped clients. The defaults of unit, delta, gamma and onto are
        those of a public program (github.com/Yandy61/myPFL), probably the authors'; it clusters angles. With
        gamma=group, β = 0 is FedAvg, as the paper states; with gamma=all it is slower. In eq. 5 both choices give the
        same Ψ. There is at least one round of warm-up and one after it. A zero update has cosine 0 with others. All
        clients take part in round T_pre. A client that does not report in it has no group: it receives w_g and does not
        count in eq. 5 and Γ. Its first later report assigns it to the group with the largest cosine between the
        client's update and the group model's difference from that w_g, effective from the next round. If fewer than M
        clients report, the warm-up continues until a round in which M do. A group without participants keeps w_m.
        Running statistics of normalisation layers are mixed with their layer's Ψ; their updates are added to W_m
        always, since a variance could become negative.
    """

    def __init__(
        self,
        *,
        groups: Count = 3,
        beta: Probability = 0.6,
        warmup: Share = 0.5,
        unit: UnitKind = "tensor",
        delta: Literal["norm", "per_entry"] = "per_entry",
        gamma: Literal["all", "group"] = "group",
        onto: Literal["group", "mixture"] = "mixture",
        cluster_on: ClusterOn = "directions",
    ):
        self.groups = groups
        self.beta = float(beta)
        self.warmup = warmup
        self.unit, self.delta, self.gamma, self.onto = unit, delta, gamma, onto
        self.cluster_on: ClusterOn = cluster_on

    def warmup_rounds(self, rounds: int) -> int:
        """Return T_pre: the fraction of the rounds, rounded half up, within 1 to rounds − 1."""
        return max(1, min(int(self.warmup * rounds + 0.5), rounds - 1))

    def full_participation(self, round_number: int, rounds: int) -> bool:
        """Return whether this is round T_pre, after which all clients are grouped."""
        return round_number == self.warmup_rounds(rounds)

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model."""
        clients, rounds = len(federation.clients), federation.rounds
        bounded(f"clients={clients}, method.groups", self.groups, 1, clients)
        if rounds < 2:
            raise SettingsError(f"rounds={rounds}: FedALP needs at least 2, one of warm-up and one after it")
        layout = federation.layouts[self.unit]
        examples = torch.tensor([c.num_examples for c in federation.clients], dtype=torch.float64)
        groups, psi = torch.zeros(0, dtype=torch.int64), torch.zeros(0, len(layout), dtype=torch.float64)
        return State(examples, layout, self.warmup_rounds(rounds), 0, dict(federation.initial), groups, psi, (), ())

    def downlink(self, state: State, client: int) -> Message:
        """Send w_g during the warm-up and to clients without a group, else the mixture of the client's group."""
        group = int(state.groups[client]) if state.mixtures else -1
        return Message(weights=state.weights if group < 0 else state.mixtures[group])

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Average as FedAvg during the warm-up and group the clients at its end; then update group models and w_g."""
        state = replace(state, fused=state.fused + 1)
        if not uplinks:
            return state
        if state.models:
            return self._step(state, uplinks)
        warm = replace(state, weights=example_means(uplinks, state.weights))
        ends = state.fused >= state.warmup and len(uplinks) >= self.groups
        return self._group(warm, state.weights, uplinks) if ends else warm

    def _group(self, state: State, received: Tensors, uplinks: Sequence[Uplink]) -> State:
        """Group the clients (Algorithm 2), with w_m = w_g (Algorithm 1, line 3)."""
        ids = torch.tensor([u.client for u in uplinks], dtype=torch.int64)
        sent = [u.weights for u in uplinks]

        def updates(unit: Unit) -> Iterator[Tensor]:  # Δ of one layer in blocks of columns [K, B]
            for key in unit.parameters:
                after, before = blocks(flat_rows(sent, key)), blocks(flat_rows([received], key))
                yield from (new.sub_(old) for new, old in zip(after, before, strict=True))

        gram = update_products(sent, received, (key for unit in state.layout for key in unit.parameters))
        groups = torch.full((len(state.examples),), -1)
        groups[ids] = ward_clusters(cosine_similarity(gram), self.groups, self.cluster_on)
        norms = torch.zeros(self.groups, len(state.layout), dtype=torch.float64)
        for number, unit in enumerate(state.layout):
            for own in updates(unit):
                mean = cluster_means(own, groups[ids], state.examples[ids], own.new_zeros(self.groups, own.shape[1]))
                norms[:, number] += mean.square().sum(1)
            entries = sum(received[key].numel() for key in unit.parameters)
            norms[:, number] = norms[:, number].sqrt() / (entries if self.delta == "per_entry" else 1)
        same = (state.weights,) * self.groups
        return replace(state, groups=groups, psi=layer_weights(norms, self.beta), models=same, mixtures=same)

    def _step(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Update the models (Algorithm 1, lines 6, 10 and 11), and assign reporting clients without a group."""
        ids = torch.tensor([u.client for u in uplinks], dtype=torch.int64)
        of, examples, sent = state.groups[ids], state.examples[ids], [u.weights for u in uplinks]
        grouped = state.groups >= 0
        shares = state.groups[grouped].bincount(state.examples[grouped], self.groups)  # Γ
        sizes = of[of >= 0].bincount(examples[of >= 0], self.groups)  # examples of each group's participants
        step = sizes / state.examples.sum() if self.gamma == "all" else (sizes > 0).double()  # Σ γ_k
        models: list[dict[str, Tensor]] = [{} for _ in state.models]
        mixtures: list[dict[str, Tensor]] = [{} for _ in state.models]
        common: dict[str, Tensor] = {}
        for unit, psi in zip(state.layout, state.psi.T, strict=True):
            for key in unit.keys:
                old, start, new = stack(state.models, key), stack(state.mixtures, key), column(sent, key)
                base = old if self.onto == "group" and key in unit.parameters else start
                change = cluster_means(new, of, examples, start.double()) - start
                scale, took_part = (v.view(-1, *[1] * (old.dim() - 1)) for v in (step, sizes > 0))
                own = torch.where(took_part, base + scale * change, old).to(old.dtype)
                common[key] = weighted_mean(own, shares)
                mixed = mix_layer(own, common[key], psi)
                for m in range(self.groups):
                    models[m][key], mixtures[m][key] = own[m].clone(), mixed[m].clone()
        groups = self._assign_groups(state, models, uplinks)
        return replace(state, weights=common, groups=groups, models=tuple(models), mixtures=tuple(mixtures))

    def _assign_groups(self, state: State, models: Sequence[Tensors], uplinks: Sequence[Uplink]) -> Tensor:
        """Return the groups after assigning the reporting clients that have none; ties go to the first group.

        Updates of clients and groups are both relative to the w_g that the client received.
        """
        new = [u for u in uplinks if state.groups[u.client] < 0]
        if not new:
            return state.groups
        sent = [u.weights for u in new]
        products = torch.zeros(len(new), len(models), dtype=torch.float64)
        squares = torch.zeros(len(models), dtype=torch.float64)
        for key in (key for unit in state.layout for key in unit.parameters):
            part = directions(flat_rows(sent, key), flat_rows(models, key), state.weights[key].reshape(-1))
            products += part[0]
            squares += part[1]
        lengths = squares.sqrt()
        groups = state.groups.clone()
        along = torch.where(lengths > 0, products / lengths, torch.zeros_like(products))
        groups[[u.client for u in new]] = along.argmax(1)
        return groups

    def numbers(self, state: State) -> Tensors:
        """Return `psi` [M, L], `groups` [N] (−1: none) and group models `group/<key>` [M, ...] after the warm-up."""
        if not state.models:
            return {}
        models = {f"group/{key}": stack(state.models, key) for key in state.weights}
        return {"psi": state.psi, "groups": state.groups, **models}

    def diagnostics(self, state: State) -> list[Matrix]:
        """Return Ψ, and who is in which group."""
        if not state.models:
            return []
        layers = Axis("layer", tuple(unit.name for unit in state.layout))
        title = "Weights Ψ of a group's own layers"
        psi = Matrix("psi", title, Axis("group"), layers, state.psi.float().cpu().numpy(), (0.0, 1.0))
        return [psi, *memberships(state.groups, len(state.psi))]
