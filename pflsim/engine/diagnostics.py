"""Diagnostics of a round: distances between clients, similarity of prototypes, confusion matrices.

They have no effect on the simulation.
"""

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

MAX_MATRIX_SIZE = 1000
"""Matrices with more rows or columns are left out: they could not be displayed."""


@dataclass(frozen=True, slots=True)
class RoundDiagnostics:
    """Diagnostics of a round that the server computes.

    Args:
        drift: ‖w_i − w̄‖ of every client that sent weights.
        matrices: empty unless they were requested.
        seconds: the time that the diagnostics took.
    """

    drift: Mapping[int, float] = field(default_factory=dict)
    matrices: tuple[Matrix, ...] = ()
    seconds: float = 0.0


def diagnose(
    rule: ServerRule[Any], state: Any, uplinks: Sequence[Uplink], clients: int, matrices: bool = False
) -> RoundDiagnostics:
    """Compute the diagnostics of a round after its fusion.

    Args:
        rule: the server rule.
        state: its state after the fusion.
        uplinks: the fused uplinks.
        clients: N.
        matrices: also compute matrices.
    """
    start = time.perf_counter()
    shown: list[Matrix] = []
    if matrices:
        shown += [m for m in rule.diagnostics(state) if max(m.values.shape) <= MAX_MATRIX_SIZE]
        sent = {up.client: up.prototypes for up in uplinks if up.prototypes is not None}
        if sent and clients <= MAX_MATRIX_SIZE:
            shown.append(prototype_similarity(sent, clients))
    return RoundDiagnostics(drift(uplinks), tuple(shown), time.perf_counter() - start)


def drift(uplinks: Sequence[Uplink]) -> dict[int, float]:
    """Return ‖w_i − w̄‖ of the clients that sent weights, with their unweighted mean w̄.

    Only tensors that all clients sent in the same shape count; with different architectures these may be few. The
    result is empty for fewer than two clients, or without common tensors. The mean is summed in float64 and rounded to
    the precision of the weights.
    """
    sent = {up.client: up.weights for up in uplinks if up.weights}
    if len(sent) < 2:
        return {}
    first, *others = sent.values()
    shapes = {key: value.shape for key, value in first.items() if value.is_floating_point()}
    common = [key for key, shape in shapes.items() if all(key in w and w[key].shape == shape for w in others)]
    squares = dict.fromkeys(sent, 0.0)
    for key in common:
        mean = torch.zeros_like(first[key], dtype=torch.float64)
        for weights in sent.values():
            mean.add_(weights[key])
        mean = mean.div_(len(sent)).to(first[key].dtype)
        distances = torch.stack([torch.dist(weights[key], mean) for weights in sent.values()]).tolist()
        for client, distance in zip(sent, distances, strict=True):
            squares[client] += distance**2
    return {client: math.sqrt(square) for client, square in squares.items()} if common else {}


def prototype_similarity(sent: Mapping[int, Prototypes], clients: int) -> Matrix:
    """Return the cosine of two clients' class means, averaged over the classes that both have; NaN if they share none.

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
    """Return the confusion matrix of the mean client: row c has the shares of class c's examples by predicted class.

    Every client has the same weight: if client i predicts class d for n_i[c, d] examples of class c, of n_i examples in
    all, entry [c, d] is Σ_i n_i[c, d] / n_i, divided by Σ_i n_i[c] / n_i with n_i[c] its examples of class c. A
    prediction that is not finite belongs to no class, so a row may sum to less than one.

    Args:
        rows: of one model, phase and split; rows without counts by class are ignored.
        classes: C.

    Returns:
        None if no row has counts by class.
    """
    predictions, examples = np.zeros((classes, classes)), np.zeros(classes)
    for row in rows:
        for true, predicted, count in row.confusion:
            examples[true] += count / row.total
            if predicted >= 0:
                predictions[true, predicted] += count / row.total
    if not examples.any():
        return None
    with np.errstate(invalid="ignore"):
        values = (predictions / examples[:, None]).astype(np.float32)
    title = "Confusion of the mean client: share of a class's test examples"
    return Matrix("confusion", title, Axis("true class"), Axis("predicted class"), values, (0.0, 1.0))
