"""The server of pFedLA and HeurpFedLA: a hypernetwork per client generates layer-wise mixing weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pflsim.config.settings import Count, CountOrZero
from pflsim.config.validate import NonNegative, Widths
from pflsim.errors import SettingsError
from pflsim.fusion.hypernetwork import Hypernetworks, as_type, descend, draw, level, outputs, select
from pflsim.fusion.layerwise import flat_rows, mix_unit
from pflsim.fusion.means import column, uniform_mean
from pflsim.fusion.mixing_weights import Normaliser, largest_own, mixing_gradient, mixing_weights
from pflsim.messages import Message, Uplink
from pflsim.params import UnitKind, snapshot
from pflsim.servers.base import Federation, ServerRule, between_clients
from pflsim.types import Matrix, Tensors, Unit


@dataclass(frozen=True, slots=True)
class State:
    """The server's state.

    Args:
        units: the L fusion units.
        table: θ, the last parameters of each client; the initial ones until it reports.
        reported: the clients that have reported.
        nets: embedding v_i and hypernetwork ψ_i of each client, with one head of N scores per unit.
    """

    units: tuple[Unit, ...]
    table: Mapping[int, Tensors]
    reported: tuple[int, ...]
    nets: Hypernetworks


class PFedLA(ServerRule[State]):
    """Mixes each unit of each client from all clients' units (Ma et al. 2022, eqs. 3 to 12, Algorithms 1, 2).

    w̄_i^l = Σ_j α_i^{l,j}·θ_j^l (eq. 6) with α_i = HN_i(v_i; ψ_i) (eq. 4), and after the client's training
    v_i ← v_i + η·(∇_{v_i} w̄_i)ᵀ Δ_i, ψ_i likewise (eqs. 10, 11), with Δ_i = w_i(after) − w̄_i.

    Args:
        k: number of units a client keeps, those with the largest self weight (eq. 12); 0: pFedLA, above 0: HeurpFedLA.
        embedding: width of an embedding.
        hidden: widths of a hypernetwork's hidden layers.
        normaliser: maps scores to weights: softmax, or relu (scores clipped at 0, divided by their sum).
        hn_lr: η ≥ 0, the learning rate of embeddings and hypernetworks; 0 freezes them.
        unit: the fusion unit: module, tensor or model.
        start: initial mixing weights: random, or uniform (1/N each).
        update_kept: whether the step of a hypernetwork includes the units that its client keeps (Algorithm 2, line 10).
            Their Δ is the difference of the client's two last models. Without it, their weights stay at their start.

    Notes:
        Kept units are neither mixed nor sent to the client. The products use the θ from which w̄_i was mixed (the chain
        rule of eq. 8), although Algorithm 1 updates θ (line 7) before the step (line 8). All clients of a round are
        mixed from the same θ. Line 7 is read as θ_i ← w̄_i + Δ_i, the trained model, which clients send instead of Δ_i,
        since the sum would round; the size is the same. Running statistics of normalisation layers are mixed with their
        unit but do not count in the products. The paper states no η, optimiser or initialisation; this is plain
        gradient descent. A client that does not report keeps its row of the table, which counts in the mixtures; its
        embedding and hypernetwork are unchanged.
    """

    def __init__(
        self,
        *,
        k: CountOrZero = 0,
        embedding: Count = 100,
        hidden: Widths = (100, 100),
        normaliser: Normaliser = "softmax",
        hn_lr: NonNegative = 0.3,
        unit: UnitKind = "module",
        start: Literal["random", "uniform"] = "random",
        update_kept: bool = True,
    ):
        self.k, self.embedding = k, embedding
        self.hidden = tuple(hidden)
        self.normaliser: Normaliser = normaliser
        self.hn_lr, self.unit, self.start, self.update_kept = hn_lr, unit, start, update_kept

    def init(self, federation: Federation) -> State:
        """Return the state with the initial model for all clients and new hypernetworks."""
        units, clients = federation.layouts[self.unit], len(federation.clients)
        if self.k > len(units):
            names = ", ".join(unit.name for unit in units)
            raise SettingsError(f"method.k={self.k} exceeds the {len(units)} fusion units of the model ({names})")
        nets = draw(clients, self.embedding, self.hidden, [clients] * len(units), federation.seed)
        nets = as_type(nets, federation.dtype)
        table = dict.fromkeys(range(clients), federation.initial)
        return State(units, table, (), level(nets) if self.start == "uniform" else nets)

    def downlink(self, state: State, client: int) -> Message:
        """Send the client's mixture without the units that it keeps."""
        return self.downlinks(state, [client])[client]

    def downlinks(self, state: State, clients: Sequence[int]) -> dict[int, Message]:
        """Send the mixtures of several clients (eq. 6)."""
        alpha = self._alpha(state, clients)
        kept = largest_own(alpha, clients, self.k)
        table, mixtures = list(state.table.values()), [dict[str, Tensor]() for _ in clients]
        for number, unit in enumerate(state.units):
            rows = (~kept[:, number]).nonzero().flatten().tolist()
            for row, part in zip(rows, mix_unit(table, unit, alpha[rows, number]), strict=True):
                mixtures[row].update(part)
        return {client: Message(weights=m) for client, m in zip(clients, mixtures, strict=True)}

    def join(self, state: State, client: int) -> Message:
        """Send the mean of the last parameters of the clients that have reported."""
        rows = [state.table[c] for c in state.reported or state.table]
        return Message(weights={key: uniform_mean(column(rows, key)) for unit in state.units for key in unit.keys})

    def fuse(self, state: State, uplinks: Sequence[Uplink]) -> State:
        """Take a step of the reporting clients' hypernetworks, all with the same table; then update their rows."""
        if not uplinks:
            return state
        clients, after = [u.client for u in uplinks], [u.weights for u in uplinks]
        alpha, table = self._alpha(state, clients), list(state.table.values())
        products = torch.zeros_like(alpha)  # [K, L, N], ⟨θ_j^l, −Δ_i^l⟩
        kept = largest_own(alpha, clients, self.k)
        own = one_hot(torch.tensor(clients), len(table)).to(alpha)
        started = torch.where(kept[..., None], own[:, None], alpha)  # a kept unit is the client's own
        for number, unit in enumerate(state.units):
            rows = [row for row in range(len(clients)) if self.update_kept or not kept[row, number]]
            trained = [after[row] for row in rows]
            for key in unit.parameters if rows else ():
                mixed, targets = flat_rows(table, key), flat_rows(trained, key)
                products[rows, number] += mixing_gradient(started[rows, number], mixed, targets)

        def objective(scores: list[Tensor]) -> Tensor:
            return (mixing_weights(torch.stack(scores, dim=1), clients, self.normaliser) * products).sum()

        nets = descend(state.nets, clients, objective, self.hn_lr)
        table_after = {**state.table, **dict(zip(clients, [snapshot(sent) for sent in after], strict=True))}
        return State(state.units, table_after, tuple(sorted({*state.reported, *clients})), nets)

    def numbers(self, state: State) -> Tensors:
        """Return the mixing weights and the hypernetworks.

        `alpha/<unit>` is [N, N] with receivers as rows. With k > 0, `kept` [N, L] marks the units that the next
        downlinks omit. v is `embedding` [N, E]; ψ is `hidden/<i>/weight`, `head/<unit>/weight` and the biases.
        """
        clients = list(state.table)
        alpha = self._alpha(state, clients)
        named = {f"alpha/{unit.name}": alpha[:, number] for number, unit in enumerate(state.units)}
        if self.k:
            named["kept"] = largest_own(alpha, clients, self.k)
        layers = {f"hidden/{i}": layer for i, layer in enumerate(state.nets.hidden)}
        layers |= {f"head/{unit.name}": head for unit, head in zip(state.units, state.nets.heads, strict=True)}
        for name, layer in layers.items():
            named |= {f"{name}/weight": layer.weight, f"{name}/bias": layer.bias}
        return {**named, "embedding": state.nets.embeddings}

    def diagnostics(self, state: State) -> list[Matrix]:
        """Return α."""
        return between_clients(self.numbers(state), "alpha", "Aggregation weights α")

    def _alpha(self, state: State, clients: Sequence[int]) -> Tensor:
        """Return α of these clients, [K, L, N] (eqs. 3, 4)."""
        scores = torch.stack(outputs(select(state.nets, clients)), dim=1)
        return mixing_weights(scores, clients, self.normaliser)
