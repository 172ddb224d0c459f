"""The server of FedALP: FedAvg, then groups whose layers lie between a group's model and the common one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pflsim.config.validate import at_least_one
from pflsim.errors import SettingsError
from pflsim.fusion.adaptive import layer_weights, mix_layer
from pflsim.fusion.blocks import blocks
from pflsim.fusion.clusters import cluster_means, cosine_similarity, directions, ward_clusters
from pflsim.fusion.layerwise import column, flat_rows, stack
from pflsim.fusion.means import weighted_mean
from pflsim.messages import Message, Uplink
from pflsim.params import UnitKind
from pflsim.servers.base import Federation, ServerRule
from pflsim.servers.fedavg import FedAvg
from pflsim.servers.fedavg import State as Mean
from pflsim.types import Axis, Matrix, Tensors, Unit


@dataclass(frozen=True, slots=True)
class State:
    """What the server keeps.

    Args:
        examples: every client's training examples, by id.
        layout: the L fusion units.
        warmup: T_pre.
        fused: rounds so far, those without any uplink too.
        weights: w_g.
        groups: [N] the group of every client, −1: in none yet; [0] during the warm-up, as the next three.
        psi: Ψ [M, L].
        models: w_m of every group.
        mixtures: what every group is sent.
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


class FedALP(ServerRule[State]):
    """Adaptive layer-based personalisation (Xie et al. 2022, Algorithms 1 and 2).

    Rounds 1 to T_pre are FedAvg. After round T_pre the clients are put into M groups by the cosines of their updates of
    that round (eqs. 3, 4), and every layer of a group gets a weight Ψ from the length of the group's mean update there
    (eqs. 5 to 8). In the rounds after it, group m is sent W_m = Ψ_m·w_m + (1 − Ψ_m)·w_g (eq. 9), and

        w_m ← w_m + Σ_{k∈G_m} γ_k·(w_k − W_m),    w_g ← Σ_m Γ_m·w_m

    Args:
        groups: M, 1 to N.
        beta: β in [0, 1], how personal the most personal layer is; the paper: 0.6.
        warmup: T_pre as a share of the rounds, above 0 and below 1; the paper: 0.4 to 0.7. There is at least one round
            of warm-up and one after it.
        unit: what a layer is: module, tensor or model.
        delta: the length δ of an update in a layer: its "norm" (eq. 7), or "per_entry", the norm divided by the number
            of the layer's parameters.
        onto: what a group's mean update is added to: the "group" model w_m (Algorithm 1, line 10), or the "mixture" W_m
            that it was trained from, which makes w_m the mean of the trained models.

    Notes:
        The printed formulas are the defaults; the paper's Table 2 rather fits the other choices (docs/methods).
        γ_k are the shares of the training examples among the group's participants and sum to one in every group;
        Γ_m are the shares of all N clients. With γ_k as printed (shares of all N) β = 0 would not be FedAvg, which
        the paper says it is.
        Ward's clustering is of the directions of the updates: their distances are √(2 − 2ρ).
        All clients take part in round T_pre. An update that is zero has the cosine 0 with all others.
        A client that did not report in round T_pre is in no group: it is sent w_g, and does not count in eq. 5 and Γ.
        Its first later report puts it into the group whose model, seen from that w_g, lies most in the direction of its
        update; from the next round on it is one of the group. Where fewer than M report in round T_pre, the warm-up
        goes on until a round in which M do. After the warm-up a client that did not report does not count in γ_k, and a
        group without participants keeps w_m.
        Running statistics of normalisation layers are mixed with their layer's Ψ, but they are states and no sums of
        updates: w_m of them is the participants' mean, without which a variance could become negative.
    """

    def __init__(
        self,
        *,
        groups: int = 3,
        beta: float = 0.6,
        warmup: float = 0.5,
        unit: UnitKind = "module",
        delta: Literal["norm", "per_entry"] = "norm",
        onto: Literal["group", "mixture"] = "group",
    ):
        if not 0 <= beta <= 1:
            raise SettingsError(f"method.beta={beta} must be in [0, 1]: 0 is FedAvg, 1 keeps a layer in its group")
        if not 0 < warmup < 1:
            raise SettingsError(f"method.warmup={warmup} must be above 0 and below 1: it is a share of the rounds")
        self.groups = at_least_one("method.groups", groups)
        self.beta, self.warmup, self.unit = float(beta), warmup, unit
        self.delta, self.onto = delta, onto

    def warmup_rounds(self, rounds: int) -> int:
        """T_pre: the share of the rounds, rounded half up, and 1 to rounds − 1."""
        return max(1, min(int(self.warmup * rounds + 0.5), rounds - 1))

    def full_participation(self, round_number: int, rounds: int) -> bool:
        """All clients take part in round T_pre, since all of them are put into groups."""
        return round_number == self.warmup_rounds(rounds)

    def init(self, federation: Federation) -> State:
        """The common initial model."""
        clients, rounds = len(federation.clients), federation.rounds
        if self.groups > clients:
            raise SettingsError(
                f"method.groups={self.groups} is more than the {clients} clients that train; give 1 to {clients}"
            )
        if rounds < 2:
            raise SettingsError(f"rounds={rounds}: there must be a round of warm-up and one after it; give at least 2")
        layout = federation.layouts[self.unit]
        return State(
            examples=torch.tensor([c.num_examples for c in federation.clients], dtype=torch.float64),
            layout=layout,
            warmup=self.warmup_rounds(rounds),
            fused=0,
            weights=dict(federation.initial),
            groups=torch.zeros(0, dtype=torch.int64),
            psi=torch.zeros(0, len(layout), dtype=torch.float64),
            models=(),
            mixtures=(),
        )

    def downlink(self, state: State, client: int) -> Message:
        """w_g during the warm-up and to who has no group, else the mixture of the client's group, one for all of it."""
        group = int(state.groups[client]) if state.mixtures else -1
        return Message(weights=state.weights if group < 0 else state.mixtures[group])

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """FedAvg's mean in the warm-up, which ends with the grouping; then the groups' models and their mean."""
        state = replace(state, fused=state.fused + 1)
        if not uplinks:
            return state
        if state.models:
            return self._step(state, uplinks)
        warm = replace(state, weights=FedAvg().fuse(Mean(state.weights), uplinks).weights)
        ends = state.fused >= state.warmup and len(uplinks) >= self.groups
        return self._group(warm, state.weights, uplinks) if ends else warm

    def _group(self, state: State, received: Tensors, uplinks: Sequence[Uplink]) -> State:
        """Algorithm 2, with w_m = w_g to begin with (Algorithm 1, line 3)."""
        ids = torch.tensor([u.client for u in uplinks], dtype=torch.int64)
        sent = [u.weights for u in uplinks]

        def updates(unit: Unit) -> Iterator[Tensor]:  # Δ of one layer, a block of columns [K, B] at a time
            for key in unit.parameters:
                after, before = blocks(flat_rows(sent, key)), blocks(flat_rows([received], key))
                yield from (new.sub_(old) for new, old in zip(after, before, strict=True))

        gram = torch.zeros(len(ids), len(ids), dtype=torch.float64)
        for d in (d for unit in state.layout for d in updates(unit)):
            gram.addmm_(d, d.T)
        groups = torch.full((len(state.examples),), -1)
        groups[ids] = ward_clusters(cosine_similarity(gram), self.groups)
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
        """Algorithm 1, lines 6, 10 and 11; and groups for those of the round that have none."""
        ids = torch.tensor([u.client for u in uplinks], dtype=torch.int64)
        of, examples, sent = state.groups[ids], state.examples[ids], [u.weights for u in uplinks]
        placed = state.groups >= 0
        shares = torch.zeros(self.groups, dtype=torch.float64)  # Γ
        shares.index_add_(0, state.groups[placed], state.examples[placed])
        models: list[dict[str, Tensor]] = [{} for _ in state.models]
        mixtures: list[dict[str, Tensor]] = [{} for _ in state.models]
        common: dict[str, Tensor] = {}
        for unit, psi in zip(state.layout, state.psi.T, strict=True):
            for key in unit.keys:
                old, new = stack(state.models, key), column(sent, key)
                if self.onto == "group" and key in unit.parameters:
                    start = stack(state.mixtures, key).double()  # Σ γ_k = 1, so Σ γ_k·Δ_k is the mean less the start
                    own = (old.double() + cluster_means(new, of, examples, start) - start).to(old.dtype)
                else:
                    own = cluster_means(new, of, examples, old)
                common[key] = weighted_mean(own, shares)
                mixed = mix_layer(own, common[key], psi)
                for m in range(self.groups):
                    models[m][key], mixtures[m][key] = own[m].clone(), mixed[m].clone()
        groups = self._placed(state, models, uplinks)
        return replace(state, weights=common, groups=groups, models=tuple(models), mixtures=tuple(mixtures))

    def _placed(self, state: State, models: Sequence[Tensors], uplinks: Sequence[Uplink]) -> Tensor:
        """The groups, with one for every client of the round that was in none; of equal ones the first.

        A client's update and what the groups have come to are both seen from the w_g that the client was sent.
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

    def global_weights(self, state: State) -> Tensors:
        """w_g."""
        return state.weights

    def numbers(self, state: State) -> Tensors:
        """After the warm-up: `psi` [M, L], `groups` [N] (−1: in none), the groups' models as `group/<key>` [M, ...]."""
        if not state.models:
            return {}
        models = {f"group/{key}": stack(state.models, key) for key in state.weights}
        return {"psi": state.psi, "groups": state.groups, **models}

    def diagnostics(self, state: State) -> list[Matrix]:
        """Ψ, to look at."""
        if not state.models:
            return []
        layers = Axis("layer", tuple(unit.name for unit in state.layout))
        title = "Weights Ψ of a group's own layers"
        return [Matrix("psi", title, Axis("group"), layers, state.psi.float().cpu().numpy(), (0.0, 1.0))]
