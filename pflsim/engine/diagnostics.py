"""What is seen of a round beside its figures: how far clients are apart, how alike what they send is, what is taken for
what. Nothing here goes back into the simulation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pflsim.messages import Prototypes, Uplink
from pflsim.servers.base import ServerRule
from pflsim.types import Axis, EvalRow, Matrix

MOST_CLIENTS = 1000
"""With more clients there are no matrices of clients by clients: nobody could look at them."""


@dataclass(frozen=True, slots=True)
class RoundDiagnostics:
    """What the server saw of a round.

    Args:
        drift: ‖w_i − w̄‖ of every client that sent weights.
        matrices: what there is to look at; empty where nobody asked.
        seconds: how long looking took.
    """

    drift: Mapping[int, float] = field(default_factory=dict)
    matrices: tuple[Matrix, ...] = ()
    seconds: float = 0.0


def diagnose(
    rule: ServerRule[Any], state: Any, uplinks: Sequence[Uplink], clients: int, matrices: bool = False
) -> RoundDiagnostics:
    """Look at a round after its fusion.

    Args:
        rule: the server's.
        state: its state after the fusion.
        uplinks: what was fused.
        clients: N.
        matrices: whether to make them.
    """
    start = time.perf_counter()
    shown = _matrices(rule, state, uplinks, clients) if matrices else ()
    return RoundDiagnostics(drift(uplinks), tuple(shown), time.perf_counter() - start)


def _matrices(rule: ServerRule[Any], state: Any, uplinks: Sequence[Uplink], clients: int) -> list[Matrix]:
    shown = [m for m in rule.diagnostics(state) if max(m.values.shape) <= MOST_CLIENTS]
    sent = {up.client: up.prototypes for up in uplinks if up.prototypes is not None}
    if sent and clients <= MOST_CLIENTS:
        shown.append(prototype_similarity(sent, clients))
    return shown


def drift(uplinks: Sequence[Uplink]) -> dict[int, float]:
    """‖w_i − w̄‖ of the clients that sent weights, w̄ their unweighted mean.

    Counts what all of them sent in the same shape; with different architectures that may be a part of it. Fewer than
    two clients, or nothing in common: nothing. The mean is summed up in float64; it and the distance in each tensor are
    in the weights' own precision, which is enough to look at.
    """
    sent = {up.client: up.weights for up in uplinks if up.weights}
    if len(sent) < 2:
        return {}
    first, *others = sent.values()
    common = [
        key
        for key, value in first.items()
        if value.is_floating_point() and all(key in w and w[key].shape == value.shape for w in others)
    ]
    squares = dict.fromkeys(sent, 0.0)
    for key in common:
        mean = torch.zeros_like(first[key], dtype=torch.float64)
        for weights in sent.values():
            mean.add_(weights[key])
        mean = mean.div_(len(sent)).to(first[key].dtype)
        for client, weights in sent.items():
            squares[client] += float(torch.dist(weights[key], mean)) ** 2
    return {client: math.sqrt(square) for client, square in squares.items()} if common else {}


def prototype_similarity(sent: Mapping[int, Prototypes], clients: int) -> Matrix:
    """Cosine of two clients' class means, averaged over the classes that both have; NaN where there is none.

    Args:
        sent: class means [C, D] by client.
        clients: N.
    """
    ids = sorted(sent)
    held = torch.stack([sent[i].counts > 0 for i in ids]).cpu()  # [K, C]
    shared = held.double() @ held.double().T
    cosines = torch.zeros_like(shared)
    for c in range(held.shape[1]):
        own = torch.stack([sent[i].means[c].flatten().double().cpu() for i in ids])  # [K, D]
        unit = torch.nn.functional.normalize(own, dim=1).where(held[:, c, None], 0.0)
        cosines.addmm_(unit, unit.T)
    cosines /= shared
    values = np.full((clients, clients), np.nan, np.float32)
    values[np.ix_(ids, ids)] = torch.where(shared > 0, cosines, float("nan")).numpy()
    title = "Similarity of class prototypes: cosine, mean over the classes that both clients have"
    return Matrix("prototype_similarity", title, Axis("client"), Axis("client"), values)


def mean_confusion(rows: Iterable[EvalRow], classes: int) -> Matrix | None:
    """What the mean client takes its test examples for: in each row, of the examples of a class, the share that is
    taken for each class.

    Every client counts the same: with n_i[c, d] of client i's n_i examples of class c taken for d, entry [c, d] is
    Σ_i n_i[c, d] / n_i, divided by the sum over all of the row's examples. Predictions that are not finite are of no
    class, so that a row may sum to less than one.

    Args:
        rows: of one scope; those without counts by class are left out.
        classes: C.

    Returns:
        None where no row has counts by class.
    """
    taken, examples = np.zeros((classes, classes)), np.zeros(classes)
    for row in rows:
        for true, predicted, count in row.confusion:
            examples[true] += count / row.total
            if predicted >= 0:
                taken[true, predicted] += count / row.total
    if not examples.any():
        return None
    with np.errstate(invalid="ignore"):
        values = (taken / examples[:, None]).astype(np.float32)
    title = "Confusion of the mean client: share of a class's test examples"
    return Matrix("confusion", title, Axis("true class"), Axis("predicted class"), values, (0.0, 1.0))
