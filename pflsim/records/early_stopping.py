"""Early stopping: when the validation accuracy of the reported model has stopped improving."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pflsim.records.history import RoundMetrics
from pflsim.records.metrics import Scope


def validation_scores(history: Iterable[RoundMetrics], reported: Scope) -> dict[int, float]:
    """Return the mean validation accuracy of the reported model by round, for the rounds that evaluate it."""
    scope = reported._replace(split="val")
    return {line.round: line.accuracy[scope].mean for line in history if scope in line.accuracy}


def stalled_since(scores: Mapping[int, float], patience: int | None) -> int | None:
    """Return the round after which `patience` evaluations in sequence are not better; None if there is none.

    Args:
        scores: the score by round, ascending. An equal score is not better.
        patience: the number of evaluations, from 1; None: any number is accepted.
    """
    best, waited = None, 0
    for number, score in scores.items():
        if best is None or score > scores[best]:
            best, waited = number, 0
        else:
            waited += 1
        if waited == patience:
            return best
    return None
