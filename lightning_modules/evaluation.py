"""Counting correct predictions, and a client's metrics from the counts of one evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pflsim.data.federated import Examples

Predict = Callable[[Tensor], Tensor]


def totals(
    predict: Predict, examples: Examples, batch_size: int | None = None, outcomes: list[Tensor] | None = None
) -> Tensor:
    """Count correct predictions without waiting for the device.

    Args:
        predict: inputs [B, ...] → scores [B, C]; its module is in evaluation mode.
        examples: the examples to predict.
        batch_size: examples per forward pass; None: the default of the device.
        outcomes: if given, one [B, 3] float64 tensor of (class, predicted class, confidence) is appended per forward
            pass. Confidence is the highest softmax probability. Scores that are not finite predict −1, and their
            confidence is NaN.

    Returns:
        [2] float64 on the examples' device: the number of correct predictions and the summed cross-entropy in nats.
    """
    found = torch.zeros(2, dtype=torch.float64, device=examples.y.device)
    with torch.inference_mode():
        for inputs, labels in examples.in_turn(batch_size):
            scores = predict(inputs)
            # argmax of NaN is a class, so a diverged model would get that class right
            predicted = scores.argmax(1).masked_fill_(~scores.isfinite().all(1), -1)
            if outcomes is not None:
                confidence = scores.double().softmax(1).amax(1)
                outcomes.append(torch.stack((labels.double(), predicted.double(), confidence), dim=1))
            found[0] += (predicted == labels).sum()
            found[1] += functional.cross_entropy(scores, labels, reduction="sum")
    return found


def confusion(outcomes: list[Tensor]) -> tuple[tuple[int, int, int], ...]:
    """Return (class, predicted class, number of examples) for each pair that occurs, in ascending order."""
    if not outcomes:
        return ()
    found, counts = torch.cat(outcomes)[:, :2].long().unique(dim=0, return_counts=True)
    return tuple((*pair, n) for pair, n in zip(found.tolist(), counts.tolist(), strict=True))


BINS = 15
"""The number of equally wide bins of confidence for the expected calibration error."""


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Counts of one model's predictions on one split of a client that has examples.

    Args:
        examples: [C] examples by class.
        predicted: [C] examples by predicted class.
        correct: [C] correct predictions by class.
        bins: [3, BINS] examples, correct predictions, and summed confidence by bin of confidence.
        loss: summed cross-entropy in nats.
    """

    examples: np.ndarray
    predicted: np.ndarray
    correct: np.ndarray
    bins: np.ndarray
    loss: float


def balanced_accuracy(counts: Counts) -> float:
    """Return the mean recall over the classes that the client has; other classes do not count."""
    present = counts.examples > 0
    return float((counts.correct[present] / counts.examples[present]).mean())


def macro_f1(counts: Counts) -> float:
    """Return the mean F1 score over the classes that occur among the client's labels or predictions.

    A class that is predicted, but that the client does not have, counts with an F1 score of 0.
    """
    occurrences = counts.examples + counts.predicted
    occurs = occurrences > 0
    return float((2 * counts.correct[occurs] / occurrences[occurs]).mean())


def nll(counts: Counts) -> float:
    """Return the mean negative log-likelihood of the true class (cross-entropy) per example, in nats."""
    return counts.loss / float(counts.examples.sum())


def ece(counts: Counts) -> float:
    """Return the expected calibration error (Guo et al., On Calibration of Modern Neural Networks, eq. 3).

    Σ_b n_b / n · |accuracy_b − confidence_b| over `BINS` bins (m/BINS, (m + 1)/BINS], where a confidence is the highest
    softmax probability. NaN if a score is not finite.
    """
    examples, correct, confidence = counts.bins
    return float(np.abs(correct - confidence).sum() / examples.sum())


METRICS: dict[str, Callable[[Counts], float]] = {f.__name__: f for f in (balanced_accuracy, macro_f1, nll, ece)}


def metrics_of(names: Sequence[str], outcomes: Sequence[Tensor], loss: float) -> dict[str, float]:
    """Return metrics by name.

    Args:
        names: keys of `METRICS`.
        outcomes: see `lightning_modules.evaluation.totals`.
        loss: summed cross-entropy in nats.

    Returns:
        Nothing if there are no examples.
    """
    if not names or not outcomes:
        return {}
    labels, predicted, confidence = torch.cat(list(outcomes)).cpu().numpy().T
    right = labels == predicted
    classes = int(max(labels.max(), predicted.max())) + 1
    by_class = (labels, predicted[predicted >= 0], labels[right])
    examples, guessed, correct = (np.bincount(found.astype(int), minlength=classes) for found in by_class)
    bin_of = np.digitize(confidence, np.arange(1, BINS) / BINS, right=True)
    bins = np.stack([np.bincount(bin_of, weights, BINS) for weights in (None, right, confidence)])
    counts = Counts(examples, guessed, correct, bins, loss)
    return {name: METRICS[name](counts) for name in names}
