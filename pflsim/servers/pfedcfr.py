"""The server of pFedCFR."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pflsim.config.validate import Positive
from pflsim.errors import SettingsError
from pflsim.fusion.attentive import check_self_weight
from pflsim.fusion.layerwise import collaborate
from pflsim.fusion.means import column, uniform_mean
from pflsim.messages import Message, Uplink
from pflsim.params import Threshold, UnitKind, resolve_threshold, snapshot
from pflsim.servers.base import Federation, ServerRule, between_clients
from pflsim.types import Matrix, Tensors, Unit


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        clients: N.
        initial: the initial weights, sent to clients that have not reported yet.
        mixed, common: the units up to the threshold, and those after it.
        table: the last upload of each client that has reported.
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
    """Attentive mixing for the units l ≤ r (eq. 10) and the uniform mean for l > r (eq. 12) (eq. 5).

    Args:
        alpha: α; the paper: 1e4.
        sigma: σ; the paper: 1e6. (N−1)·α/σ must not exceed 1 unless `clamp` is set.
        r: the threshold: a number of units, a fraction of them, or "body" (all before the classifier).
        unit: the fusion unit: module, tensor or model.
        clamp: set negative self weights to 0 and renormalise the rows, which permits a larger α/σ.

    Notes:
        The fusion uses the last upload of each client that has reported so far, as FedAMP's server does. A client that
        has not reported yet does not count, and receives the initial values of the mixed units.
    """

    def __init__(
        self,
        *,
        alpha: Positive = 1e4,
        sigma: Positive = 1e6,
        r: Threshold = "body",
        unit: UnitKind = "module",
        clamp: bool = False,
    ):
        self.alpha, self.sigma, self.clamp = alpha, sigma, clamp
        self.r: Threshold = r
        self.unit = unit

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model and the units on both sides of the threshold."""
        clients = len(federation.clients)
        check_self_weight(clients, self.alpha, self.sigma, self.clamp)
        layout = federation.layouts[self.unit]
        threshold = resolve_threshold(self.r, layout)
        if self.r == "body" and threshold == 0:
            chosen = f"method.r=body with method.unit={self.unit}"
            raise SettingsError(f"{chosen}: no unit ends before the classifier; set method.r to a number")
        mixed, common = layout[:threshold], layout[threshold:]
        mean = {key: federation.initial[key] for unit in common for key in unit.keys}
        return State(clients, dict(federation.initial), mixed, common, {}, {}, mean, {})

    def downlink(self, state: State, client: int) -> Message:
        """Send the client's mixture and the common units."""
        if not state.mixed:
            return Message(weights=state.mean)  # one object for all clients is transferred once
        mixture = state.mixtures.get(client)
        if mixture is None:
            mixture = {key: state.initial[key] for unit in state.mixed for key in unit.keys}
        return Message(weights={**mixture, **state.mean})

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Mix and average the last uploads."""
        if not uplinks:
            return state
        table = dict(sorted({**state.table, **{u.client: snapshot(u.weights) for u in uplinks}}.items()))
        weights = list(table.values())
        mixtures, zeta = collaborate(weights, state.mixed, alpha=self.alpha, sigma=self.sigma)
        mean = {key: uniform_mean(column(weights, key)) for unit in state.common for key in unit.keys}
        by_client = dict(zip(table, mixtures, strict=True))
        return State(state.clients, state.initial, state.mixed, state.common, table, by_client, mean, zeta)

    def global_weights(self, state: State) -> Tensors:
        """Return the uniform mean over the clients that have reported, or the initial model before any has."""
        if not state.table:
            return state.initial
        weights = list(state.table.values())
        mixed = {key: uniform_mean(column(weights, key)) for unit in state.mixed for key in unit.keys}
        return {**mixed, **state.mean}

    def numbers(self, state: State) -> Tensors:
        """Return `zeta/<unit>` [N, N], receivers as rows. A client that has not reported has weight 1 on itself."""
        ids = torch.tensor(list(state.table), dtype=torch.int64)
        named = {}
        for name, zeta in state.zeta.items():
            full = torch.eye(state.clients, dtype=torch.float64)
            full[ids[:, None], ids[None, :]] = zeta
            named[f"zeta/{name}"] = full
        return named

    def diagnostics(self, state: State) -> list[Matrix]:
        """Return ζ."""
        return between_clients(self.numbers(state), "zeta", "Mixing weights ζ")
