"""The cross-fusion rule of pFedCFR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pflsim.errors import SettingsError
from pflsim.fusion.attentive import check_self_weight
from pflsim.fusion.collaboration import Attention, collaborate
from pflsim.fusion.layerwise import column
from pflsim.fusion.means import uniform_mean
from pflsim.messages import Message, Uplink
from pflsim.params import UnitKind, resolve_threshold, snapshot
from pflsim.servers.base import Federation, ServerRule, between_clients
from pflsim.types import Matrix, Tensors, Unit


@dataclass(frozen=True, slots=True)
class State:
    """What the server keeps.

    Args:
        clients: N.
        initial: what everyone starts from; what a client is sent that has not reported yet.
        mixed, common: the units up to the threshold and beyond it.
        table: the last upload of every client that has reported.
        mixtures: the mixed units of those clients.
        mean: the common units.
        zeta: mixing weights [K, K] by unit, over the clients of the table by id.
    """

    clients: int
    initial: Tensors
    mixed: tuple[Unit, ...]
    common: tuple[Unit, ...]
    table: Mapping[int, Tensors]
    mixtures: Mapping[int, Tensors]
    mean: Tensors
    zeta: Mapping[str, Tensor]


class PFedCFR(ServerRule[State]):
    """Attentive mixing for the units l ≤ r (eq. 10), the uniform mean for l > r (eq. 12), in one pass (eq. 5).

    Args:
        alpha: α; the paper: 1e4.
        sigma: σ; the paper: 1e6. (N−1)·α/σ must not exceed 1, or a self weight could be negative.
        r: the threshold: a number of units, a fraction of them, or "body" (all before the classifier).
        unit: what a unit is: module, tensor or model.
        clamp: allow larger α/σ by clipping negative self weights at 0 and renormalising the rows.

    Notes:
        With partial participation the fusion runs over the last upload of every client that has reported so far, as
        FedAMP's server does: a client that did not report in a round counts with its former upload, and one that never
        has counts nowhere and is sent the initial values of the mixed units.
    """

    def __init__(
        self,
        *,
        alpha: float = 1e4,
        sigma: float = 1e6,
        r: int | float | str = "body",
        unit: UnitKind = "module",
        clamp: bool = False,
    ):
        self.attention = Attention(alpha, sigma, clamp)
        self.r = r
        self.unit = unit

    def init(self, federation: Federation) -> State:
        """Everyone's initial model, and the units on either side of the threshold."""
        clients = len(federation.clients)
        check_self_weight(clients, self.attention.alpha, self.attention.sigma, self.attention.clamp)
        layout = federation.layouts[self.unit]
        threshold = resolve_threshold(self.r, layout)
        if self.r == "body" and threshold == 0:
            raise SettingsError(
                f"method.r=body with method.unit={self.unit}: no unit ends before the classifier, so nothing would be "
                "mixed; give method.r as a number (0 if the plain mean of everything is meant)"
            )
        mixed, common = layout[:threshold], layout[threshold:]
        mean = {key: federation.initial[key] for unit in common for key in unit.keys}
        return State(clients, dict(federation.initial), mixed, common, {}, {}, mean, {})

    def downlink(self, state: State, client: int) -> Message:
        """The client's own mixture with the common mean."""
        if not state.mixed:
            return Message(weights=state.mean)  # the same for everyone, so moved once
        mixture = state.mixtures.get(client)
        if mixture is None:
            mixture = {key: state.initial[key] for unit in state.mixed for key in unit.keys}
        return Message(weights={**mixture, **state.mean})

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Mix and average the newest uploads."""
        if not uplinks:
            return state
        table = dict(sorted({**state.table, **{u.client: snapshot(u.weights) for u in uplinks}}.items()))
        weights = list(table.values())
        mixtures, zeta = collaborate(weights, state.mixed, self.attention)
        mean = {key: uniform_mean(column(weights, key)) for unit in state.common for key in unit.keys}
        by_client = dict(zip(table, mixtures, strict=True))
        return State(state.clients, state.initial, state.mixed, state.common, table, by_client, mean, zeta)

    def global_weights(self, state: State) -> Tensors:
        """The uniform mean of all units over the clients that have reported (the initial model before anyone has)."""
        if not state.table:
            return state.initial
        weights = list(state.table.values())
        mixed = {key: uniform_mean(column(weights, key)) for unit in state.mixed for key in unit.keys}
        return {**mixed, **state.mean}

    def numbers(self, state: State) -> Tensors:
        """`zeta/<unit>` [N, N] (row: the receiver); a client that has not reported has weight 1 on itself."""
        ids = torch.tensor(list(state.table), dtype=torch.int64)
        named = {}
        for name, zeta in state.zeta.items():
            full = torch.eye(state.clients, dtype=torch.float64)
            full[ids[:, None], ids[None, :]] = zeta
            named[f"zeta/{name}"] = full
        return named

    def diagnostics(self, state: State) -> list[Matrix]:
        """The same weights, to look at."""
        return between_clients(self.numbers(state), "zeta", "Mixing weights ζ")
