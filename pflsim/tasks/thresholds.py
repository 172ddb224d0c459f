"""Thresholds of the probability of class 1 of two, and the shares of right predictions that they lead to."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pflsim.display.metrics import SHARES, THRESHOLD
from pflsim.records.evaluation import Scope, grouped
from pflsim.records.predictions import probabilities
from pflsim.tasks.metrics import OF_EACH_CLASS
from pflsim.types import EvalRow


def of_class_1(scores: Tensor) -> Tensor:
    """Return the probability of class 1 as it is recorded, [n] float32, for scores [n, 2]."""
    return probabilities("classification", scores)[:, 1].float()


def chosen(p: Tensor, y: Tensor, sensitivity: float) -> float:
    """Return the highest threshold with at least this sensitivity; NaN if there is none.

    Args:
        p: probabilities of class 1, [n].
        y: whether it is the class, [n].
        sensitivity: least share of the rows of class 1 whose probability is not below the threshold.
    """
    positive = p[y].sort(descending=True).values
    reached = positive[torch.arange(1, len(positive) + 1, dtype=torch.float64) / len(positive) >= sensitivity]
    return float(reached[0]) if len(reached) and p.isfinite().all() else math.nan


def decided(rows: Sequence[EvalRow], sensitivity: float | None) -> tuple[list[EvalRow], dict[Scope, dict[str, float]]]:
    """Choose thresholds on validation rows, for each model and phase, and return what they lead to.

    A client has its own threshold if its validation rows have `OF_EACH_CLASS` of each class, else that of the
    validation rows of all clients.

    Args:
        rows: evaluations with outcomes.
        sensitivity: see `chosen`; None: nothing is chosen.

    Returns:
        The evaluations with threshold and `SHARES` among their metrics, and these over the rows of all clients.
    """
    if sensitivity is None:
        return list(rows), {}
    found, together = [row for row in rows if not row.outcomes], dict[Scope, dict[str, float]]()
    for own in grouped(((row.model, row.phase), row) for row in rows if row.outcomes).values():
        pairs = [(of_class_1(row.outcomes[0]), row.outcomes[1] == 1) for row in own if row.outcomes]
        val = {row.client: pair for row, pair in zip(own, pairs, strict=True) if row.split == "val"}
        enough = [client for client, (_, y) in val.items() if min(int(y.sum()), int((~y).sum())) >= OF_EACH_CLASS]
        thresholds = {client: chosen(*val[client], sensitivity) for client in enough}
        pooled = chosen(*map(torch.cat, zip(*val.values(), strict=True)), sensitivity=sensitivity) if val else math.nan
        counts = dict[Scope, np.ndarray]()
        for row, (p, y) in zip(own, pairs, strict=True):
            threshold, metrics = thresholds.get(row.client, pooled), dict(row.metrics)
            if math.isfinite(threshold) and p.isfinite().all():
                yes, scope = p >= threshold, Scope(row.model, row.split, row.phase)
                each = np.array([int((a & b).sum()) for a in (yes, ~yes) for b in (y, ~y)])
                counts[scope] = counts.get(scope, np.zeros(4, int)) + each
                metrics |= {THRESHOLD: threshold, **_shares(*each)}
            found.append(replace(row, metrics=metrics))
        together |= {scope: {THRESHOLD: pooled, **_shares(*each)} for scope, each in counts.items()}
    return found, together


def _shares(tp: int, fp: int, fn: int, tn: int) -> dict[str, float]:
    """Return `SHARES` of numbers of true and false positives and negatives; without those of no rows."""
    parts = zip(SHARES, ((tp, fn), (tn, fp), (tp, fp), (tn, fn)), strict=True)
    return {name: float(right / (right + wrong)) for name, (right, wrong) in parts if right + wrong}
